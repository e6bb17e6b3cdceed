"""The models of the gate: every architecture, tensor type and mix, each made from a seed when it is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.synthesize import SHAPES, miniature, synthesize
from tests.tools.make_tiny_gguf import ARCHS, DTYPES, make_tiny_gguf


@dataclass(frozen=True)
class Fixture:
    """A model of the gate.

    Attributes:
        name: Of its record.
        write: Writes the file; None: the demo model, which is fetched.
        vocab_size: Prompts use ids below it.
        num_prompts: The first so many of PROMPT_LENGTHS.
        num_tokens: Generated for each.
    """

    name: str
    write: Callable[[Path], object] | None
    vocab_size: int
    num_prompts: int = 8
    num_tokens: int = 20


def _tiny(arch: str, dtype: str) -> Fixture:
    def write(path: Path) -> None:
        # A head of its own: a tied one, so small and random, repeats one token for ever.
        make_tiny_gguf(path, arch=arch, dtype=dtype, tied=False, rope_freqs=arch == "llama")

    return Fixture(f"tiny-{arch}-{dtype}", write, vocab_size=300)


def _mini(shape: str, mix: str) -> Fixture:
    def write(path: Path) -> None:
        synthesize(path, miniature(SHAPES[shape]), mix)

    return Fixture(f"mini-{shape}-{mix}", write, vocab_size=1200)


DEMO = Fixture("smollm2-135m", None, vocab_size=49_000, num_prompts=4, num_tokens=16)

FIXTURES = {
    fixture.name: fixture
    for fixture in (
        *(_tiny(ARCHS[i % 3], dtype) for i, dtype in enumerate(DTYPES)),
        _mini("qwen2.5-0.5b", "q4_k_m"),
        _mini("qwen2.5-1.5b", "q6_k"),
        _mini("qwen3-8b", "q4_k_m"),
        _mini("llama-3.1-8b", "q5_k_m"),
        DEMO,
    )
}

#: Below, at and above the sizes of chunks, KV blocks, segments of a prompt and splits of attention.
PROMPT_LENGTHS = (9, 64, 1, 130, 65, 7, 300, 33)


def prompts_of(fixture: Fixture) -> list[list[int]]:
    """Return the fixed prompts, as token ids from a linear congruence: the same on every machine and for ever."""
    out, state = [], 12345
    for length in PROMPT_LENGTHS[: fixture.num_prompts]:
        ids = []
        for _ in range(length):
            state = (1103515245 * state + 12345) % 2**31
            ids.append(3 + (state >> 8) % (fixture.vocab_size - 3))
        out.append(ids)
    return out
