"""Field case 1: the model talks on past its turn. One set of ends serves all that ends or forbids ending."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cyengine import Engine, FinishedEvent, FinishReason, Model, Request, TokenEvent
from tests.cases.logits import cpu
from tests.tools.make_tiny_gguf import make_tiny_gguf

LLAMA_TURNS = (
    "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
LLAMA_CONTROL = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")


def write(path: Path, end: str, **options: Any) -> tuple[int, list[int]]:
    """A model that says "ok", then `end`, then "junk" for ever; returns the id of `end` and a prompt."""
    base: dict[str, Any] = {"tied": False, "dtype": "f32", "hidden_size": 256} | options
    tokens = make_tiny_gguf(path, **base).tokens
    script = [tokens.id_of(token) for token in (">", "o", "k", end, "j", "u", "n")]
    following = dict(zip(script, [*script[1:], script[-3]], strict=True))
    make_tiny_gguf(path, **base, next_token=following, next_default=script[-1])
    return script[3], script[:1]


def id_of(path: Path, token: str, **options: Any) -> int:
    """Return the id that a model of these options has for a token."""
    return make_tiny_gguf(path, **options).tokens.id_of(token)


def check_ends(path: Path, end: int, prompt: list[int]) -> None:
    """Both ways to decode end at `end`, say so, and send nothing of it."""
    with Engine(path, cpu()) as engine:
        assert end in {token.token_id for token in engine.model.end_tokens()}
        events = list(engine.generate(prompt, max_tokens=20))
        (finished,) = (event for event in events if isinstance(event, FinishedEvent))
        assert finished.finish_reason == FinishReason.EOS
        assert finished.matched_token_id == end
        text = "".join(event.text for event in events if isinstance(event, TokenEvent)) + finished.text
        assert text == "ok"


def check_goes_on(path: Path, token: int, prompt: list[int]) -> None:
    """The token is no end: the answer goes on to its limit."""
    with Engine(path, cpu()) as engine:
        assert token not in {end.token_id for end in engine.model.end_tokens()}
        events = list(engine.generate(prompt, max_tokens=8))
        (finished,) = (event for event in events if isinstance(event, FinishedEvent))
        assert finished.finish_reason == FinishReason.MAX_TOKENS
        assert token in [event.token_id for event in events if isinstance(event, TokenEvent)]


def test_a_turn_ends_although_eos_names_another_token(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    options: dict[str, Any] = {"extra_control": LLAMA_CONTROL, "chat_template": LLAMA_TURNS}
    eos = id_of(path, "<|end_of_text|>", **options)
    end, prompt = write(path, "<|eot_id|>", **options, metadata={"tokenizer.ggml.eos_token_id": eos})
    check_ends(path, end, prompt)
    with Model(path) as model:
        sources = {token.text: token.source for token in model.end_tokens()}
        assert sources.keys() >= {"<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"}
        assert "eos_token_id" in sources["<|end_of_text|>"]
        assert not sources.keys() & {"<|start_header_id|>", "<|end_header_id|>", "<|im_start|>"}


@pytest.mark.parametrize("key", ["eos", "eot", "eom"])
def test_each_key_names_an_end(tmp_path: Path, key: str) -> None:
    # A CONTROL token that no family knows, so that nothing but the key makes it an end.
    path = tmp_path / "model.gguf"
    options: dict[str, Any] = {"extra_control": ("<|over|>",), "chat_template": None}
    key_values = {f"tokenizer.ggml.{key}_token_id": id_of(path, "<|over|>", **options)}
    end, prompt = write(path, "<|over|>", **options, metadata=key_values)
    check_ends(path, end, prompt)
    with Model(path) as model:
        assert f"{key}_token_id" in {token.token_id: token.source for token in model.end_tokens()}[end]


KNOWN = [
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "</s>",
    "<end_of_turn>",
    "<|end|>",
]
KNOWN += ["<|return|>", "<|EOT|>", "<eos>", "<｜end▁of▁sentence｜>"]


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_name_is_an_end_by_itself(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    usual = ("<|im_end|>", "<|endoftext|>")
    extra = ("<|over|>",) if name in usual else ("<|over|>", name)
    options: dict[str, Any] = {"extra_control": extra, "chat_template": None}
    other = id_of(path, "<|over|>", **options)
    end, prompt = write(path, name, **options, metadata={"tokenizer.ggml.eos_token_id": other})
    check_ends(path, end, prompt)


@pytest.mark.parametrize("name", ["<|over|>", "[/TURN]"])
def test_what_the_template_ends_an_assistants_turn_with_is_an_end(tmp_path: Path, name: str) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<|begin|>' + m.content + '<|middle|>' }}"
        "{% else %}{{ m.content + 'END' }}{% endif %}{% endfor %}"
    ).replace("END", name)
    path = tmp_path / "model.gguf"
    options: dict[str, Any] = {"extra_control": (name, "<|begin|>", "<|middle|>"), "chat_template": template}
    end, prompt = write(path, name, **options)
    check_ends(path, end, prompt)
    for start in ("<|begin|>", "<|middle|>"):
        token, prompt = write(path, start, **options)
        check_goes_on(path, token, prompt)


@pytest.mark.parametrize("name", ["<|im_start|>", "<|start_header_id|>", "<|end_header_id|>"])
def test_a_start_of_turn_is_no_end(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    token, prompt = write(path, name, extra_control=LLAMA_CONTROL, chat_template=LLAMA_TURNS)
    check_goes_on(path, token, prompt)


def test_one_set_serves_what_ends_and_what_forbids_ending(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    _, prompt = write(path, "<|eot_id|>", extra_control=LLAMA_CONTROL, chat_template=LLAMA_TURNS)
    with Engine(path, cpu()) as engine:
        ends = {token.token_id for token in engine.model.end_tokens()}
        for options in ({"min_tokens": 6}, {"min_tokens": 6, "temperature": 1.0, "seed": 3}):
            events = list(engine.generate(prompt, max_tokens=12, **options))
            tokens = [event.token_id for event in events if isinstance(event, TokenEvent)]
            assert len(tokens) >= 6
            assert not ends & set(tokens[:6])
        ignored = list(engine.generate(prompt, max_tokens=6, ignore_eos=True))
        tokens = [event.token_id for event in ignored if isinstance(event, TokenEvent)]
        assert len(tokens) == 6
        (finished,) = (event for event in ignored if isinstance(event, FinishedEvent))
        assert finished.finish_reason == FinishReason.MAX_TOKENS
        assert finished.num_generated_tokens == 6


def test_a_slot_ends_as_a_request_does(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    end, prompt = write(path, "<|eot_id|>", extra_control=LLAMA_CONTROL, chat_template=LLAMA_TURNS)
    with Engine(path, cpu()) as engine:
        slot = engine.acquire()
        engine.prefill(slot, prompt)
        (call,) = engine.submit_decode_batch([(slot, Request(max_tokens=20))], private=True)
        finished = None
        while finished is None:
            for event in engine.take_events(call, timeout_s=60):
                if isinstance(event, FinishedEvent):
                    finished = event
        assert finished.finish_reason == FinishReason.EOS
        assert finished.matched_token_id == end
