"""Shows one generation: its text as it comes, then how fast it was."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, Self

from xllm_service.cli.terminal import milliseconds, say, stream_text


@dataclass(frozen=True)
class Figures:
    """A whole generation; times are the engine's own, in seconds."""

    text: str
    reasoning_text: str
    finish_reason: str
    model: str
    request_id: str
    seed: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float

    @property
    def step_s(self) -> float | None:
        """Mean time from one token to the next; None for fewer than two tokens."""
        steps = self.num_generated_tokens - 1
        return self.decode_s / steps if steps > 0 and self.decode_s > 0 else None


class Generation(Protocol):
    """A running generation, wherever it is computed."""

    def __enter__(self) -> Self:
        """Return itself."""

    def __exit__(self, *exc: Any) -> None:
        """Cancel what still runs."""

    def __iter__(self) -> Iterator[str]:
        """Yield the text as it comes, one item per delta; "" for tokens whose text is still held back."""

    def figures(self) -> Figures:
        """Return the whole of it; after the last item."""


def show(generation: Generation, started: float, *, as_json: bool = False) -> Figures:
    """Stream a generation to stdout and its figures to stderr; or print one JSON object at its end.

    Args:
        generation: what to show; closed at the end, so that an interrupt gives its slot back.
        started: time.monotonic() at the call, where TTFT begins.
        as_json: print the object instead of the text and the figures.
    """
    ttft_s: float | None = None
    last = "\n"
    with generation:
        for text in generation:
            if ttft_s is None:
                ttft_s = time.monotonic() - started
            if text:
                last = text
                if not as_json:
                    stream_text(text)
        figures = generation.figures()
    if as_json:
        print(as_json_text(figures, ttft_s), flush=True)
        return figures
    if not last.endswith("\n"):
        stream_text("\n")
    say(summary(figures, ttft_s))
    return figures


def summary(figures: Figures, ttft_s: float | None) -> str:
    """Return one line: TTFT, step time, counts and what ended it."""
    parts = []
    if ttft_s is not None:
        parts.append(f"TTFT {milliseconds(ttft_s)}")
    if figures.step_s is not None:
        parts.append(f"step time {milliseconds(figures.step_s)} ({1 / figures.step_s:.3g} tokens/s)")
    cached = f" ({figures.num_cached_tokens} cached)" if figures.num_cached_tokens else ""
    parts.append(f"{figures.num_prompt_tokens}{cached} + {figures.num_generated_tokens} tokens")
    return f"[{', '.join(parts)}; ended by {figures.finish_reason}]"


def as_json_text(figures: Figures, ttft_s: float | None) -> str:
    """Return one JSON object; times in ms."""
    values: dict[str, Any] = {
        name: getattr(figures, name) for name in Figures.__dataclass_fields__ if not name.endswith("_s")
    }
    times = {
        "ttft": ttft_s,
        "step": figures.step_s,
        "queue": figures.queue_s,
        "prefill": figures.prefill_s,
        "decode": figures.decode_s,
    }
    values |= {f"{name}_ms": None if time_s is None else round(time_s * 1e3, 3) for name, time_s in times.items()}
    return json.dumps(values, ensure_ascii=False)
