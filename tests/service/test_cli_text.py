"""generate, chat and run: what goes to stdout, what to stderr, and what an interrupt leaves."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from typer.testing import CliRunner

from tests.service.fake_engine import FakeModel, ids_of
from xllm_service.cli import answer, conversation, terminal
from xllm_service.cli.answer import Figures, show
from xllm_service.cli.main import app
from xllm_service.engine import (
    AcceptedEvent,
    DecodeMode,
    FinishedEvent,
    FinishReason,
    LocalEngine,
    Model,
    TokenEvent,
)

FIGURES = Figures("Hi there", "", "EOS", "m", "r1", 7, 12, 0, 3, 0.001, 0.05, 0.02)


class Scripted:
    """A generation that yields these texts; an exception among them is raised."""

    def __init__(self, *texts: str | BaseException, figures: Figures = FIGURES) -> None:
        self.texts = texts
        self.is_closed = False
        self._figures = figures

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.is_closed = True

    def __iter__(self) -> Iterator[str]:
        for text in self.texts:
            if isinstance(text, BaseException):
                raise text
            yield text

    def figures(self) -> Figures:
        return self._figures


def test_text_goes_to_stdout_and_figures_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    show(Scripted("", "Hi", " there"), 0.0)
    out, err = capsys.readouterr()
    assert out == "Hi there\n"
    assert "TTFT" in err
    assert "step time 10 ms (100 tokens/s)" in err
    assert "12 + 3 tokens; ended by EOS" in err


def test_an_answer_that_ends_its_line_gets_no_other_one(capsys: pytest.CaptureFixture[str]) -> None:
    show(Scripted("Hi\n"), 0.0)
    assert capsys.readouterr().out == "Hi\n"
    show(Scripted(), 0.0)
    assert capsys.readouterr().out == ""


def test_text_is_written_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Buffered(io.StringIO):
        flushed = ""

        def flush(self) -> None:
            self.flushed = self.getvalue()

    out = Buffered()

    class Watching(Scripted):
        def __iter__(self) -> Iterator[str]:
            for text in super().__iter__():
                yield text
                seen.append(out.flushed)

    monkeypatch.setattr("sys.stdout", out)
    show(Watching("a", "b", "c"), 0.0)
    assert seen == ["a", "ab", "abc"]


def test_json_is_one_object_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    show(Scripted("Hi", " there"), 0.0, as_json=True)
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    assert found["text"] == "Hi there"
    assert found["seed"] == 7
    assert (found["num_prompt_tokens"], found["num_generated_tokens"]) == (12, 3)
    assert found["step_ms"] == 10.0
    assert found["prefill_ms"] == 50.0
    assert found["ttft_ms"] > 0


def test_a_generation_is_closed_however_it_ends() -> None:
    done, failed, stopped = Scripted("x"), Scripted("x", ValueError()), Scripted("x", KeyboardInterrupt())
    show(done, 0.0)
    with pytest.raises(ValueError):
        show(failed, 0.0)
    with pytest.raises(KeyboardInterrupt):
        show(stopped, 0.0)
    assert done.is_closed
    assert failed.is_closed
    assert stopped.is_closed


def test_one_token_has_no_step_time() -> None:
    one = Figures("x", "", "MAX_TOKENS", "m", "r", 0, 1, 0, 1, 0.0, 0.1, 0.0)
    assert one.step_s is None
    assert "step time" not in answer.summary(one, 0.1)
    assert json.loads(answer.as_json_text(one, None))["ttft_ms"] is None


def test_an_answer_cannot_drive_the_terminal() -> None:
    assert terminal.for_terminal("a\x1b[2Jb\x07\x9b\x7fc\n\tü") == "a␛[2Jb␇\ufffd␡c\n\tü"


# ---------------------------------------------------------------- conversation


def test_a_conversation_remembers_both_sides(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[dict[str, str]]] = []

    def reply(messages: conversation.Messages) -> Scripted:
        asked.append([dict(message) for message in messages])
        return Scripted("Hi there")

    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n/reset\nthree\n/exit\nfour\n"))
    conversation.converse(reply, system="be brief")
    system = {"role": "system", "content": "be brief"}
    first = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "Hi there"}]
    assert asked == [
        [system, first[0]],
        [system, *first, {"role": "user", "content": "two"}],
        [system, {"role": "user", "content": "three"}],
    ]
    assert capsys.readouterr().out == "Hi there\n" * 3


def test_at_a_terminal_a_failed_turn_is_taken_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripts = [Scripted("x", KeyboardInterrupt()), Scripted("x", ValueError("bad")), Scripted("Hi there")]
    asked: list[int] = []

    def reply(messages: conversation.Messages) -> Scripted:
        asked.append(len(messages))
        return scripts.pop(0)

    typed = iter(["one", "two", "three"])

    def type_line(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", type_line)
    conversation.converse(reply)
    assert asked == [1, 1, 1]
    err = capsys.readouterr().err
    assert "stopped" in err
    assert "ValueError: bad" in err


def test_in_a_script_a_failed_turn_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    with pytest.raises(ValueError):
        conversation.converse(lambda messages: Scripted(ValueError()))


# ---------------------------------------------------------------- in process


class FakeCore:
    """The part of cyengine.Engine that a LocalEngine streams from: it repeats the prompt, byte by byte."""

    info = None

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], dict[str, Any]]] = []
        self.is_closed = False

    def generate(self, prompt: list[int], **given: Any) -> Iterator[Any]:
        self.calls.append((prompt, given))
        yield AcceptedEvent(1, 0, 1, DecodeMode.BATCHED, 5, 16, len(prompt), 0, 0.0)
        for index, token_id in enumerate(prompt[-2:]):
            piece = bytes([token_id - 3]) if token_id >= 3 else b""
            yield TokenEvent(1, token_id, index, piece, piece.decode(), None, [])
        yield FinishedEvent(1, _ok(), FinishReason.EOS, None, None, "!", "", len(prompt), 0, 3, 0.0, 0.1, 0.02, 0.1)

    def close(self) -> None:
        self.is_closed = True


def _ok() -> Any:
    from cyengine.types import Status

    return Status.OK


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCore:
    core = FakeCore()
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("xllm_service.engine.open_model", lambda path, **_: Model(FakeModel(path)))
    monkeypatch.setattr("xllm_service.engine.open_engine", lambda model, config: LocalEngine(model, core))
    return core


def test_run_continues_a_text_as_it_is(core: FakeCore) -> None:
    result = CliRunner().invoke(app, ["run", "m.gguf", "abc", "--stop", "x", "--stop", "y", "--seed", "0"])
    assert result.exit_code == 0, result.output
    assert result.stdout == "bc!\n"
    assert core.calls == [(ids_of("abc"), {"stop_strings": ["x", "y"], "seed": 0})]
    assert core.is_closed


def test_run_reads_stdin_and_prints_json(core: FakeCore) -> None:
    result = CliRunner().invoke(app, ["run", "m.gguf", "-", "--json"], input="xyz")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["text"], found["finish_reason"], found["num_prompt_tokens"]) == ("yz!", "EOS", 3)


def test_run_applies_the_template_to_a_message(core: FakeCore) -> None:
    assert CliRunner().invoke(app, ["run", "m.gguf", "ab", "--chat"]).exit_code == 0
    assert core.calls[0][0] == [1, *ids_of("ab"), 2]


def test_run_without_a_prompt_is_a_conversation(core: FakeCore) -> None:
    result = CliRunner().invoke(app, ["run", "m.gguf"], input="ab\ncd\n")
    assert result.exit_code == 0, result.output
    assert core.calls[0][0] == [1, *ids_of("ab"), 2]
    assert core.calls[1][0][: len(core.calls[0][0]) - 1] == core.calls[0][0][:-1]
    assert result.stdout == "b!\nd!\n"
