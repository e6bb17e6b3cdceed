"""inspect and tokenize, on a model file without a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cyengine.errors import MemoryLimitError, NoTokenizerError
from cyengine.types import Plan, TensorInfo
from tests.service.fake_engine import PLAN, FakeModel, ids_of
from xllm_service.cli.inspect import tensor_types
from xllm_service.cli.main import app
from xllm_service.engine import Model

Open = Callable[[FakeModel], None]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Open:
    """Let every path open this model."""
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)

    def use(model: FakeModel) -> None:
        monkeypatch.setattr("xllm_service.engine.open_model", lambda path, **_: Model(model))

    use(FakeModel(tmp_path / "m.gguf"))
    return use


def run(*arguments: str, stdin: str | bytes = "") -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def test_tokenize_prints_ids_and_pieces_as_json(opened: Open) -> None:
    result = run("tokenize", "m.gguf", "aé", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found == {"ids": ids_of("aé"), "pieces": ["a", "\ufffd", "\ufffd"]}


@pytest.mark.parametrize("text", [["-"], []])
def test_tokenize_reads_stdin_to_its_last_byte(opened: Open, text: list[str]) -> None:
    result = run("tokenize", "m.gguf", *text, "--json", stdin="a\n\n")
    assert json.loads(result.stdout)["ids"] == ids_of("a\n\n")


def test_tokenize_prints_a_line_per_token_for_people(opened: Open) -> None:
    assert run("tokenize", "m.gguf", "a\x1b").stdout.split() == ["100", "'a'", "30", "'␛'"]


def test_written_control_tokens_stay_text_unless_asked_for(opened: Open) -> None:
    assert json.loads(run("tokenize", "m.gguf", "<|end|>", "--json").stdout)["ids"] == ids_of("<|end|>")
    parsed = json.loads(run("tokenize", "m.gguf", "<|end|>", "--json", "--parse-special").stdout)
    assert parsed == {"ids": [0], "pieces": ["<|end|>"]}


def test_no_bos_is_passed_on(opened: Open, tmp_path: Path) -> None:
    class WithBos(FakeModel):
        def encode(self, text: Any, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
            return ([1] if add_special else []) + super().encode(text)

    opened(WithBos(tmp_path / "m.gguf"))
    assert json.loads(run("tokenize", "m.gguf", "a", "--json").stdout)["ids"] == [1, *ids_of("a")]
    assert json.loads(run("tokenize", "m.gguf", "a", "--json", "--no-bos").stdout)["ids"] == ids_of("a")


def test_a_model_without_a_tokenizer_says_so(opened: Open, tmp_path: Path) -> None:
    class WithoutTokenizer(FakeModel):
        def encode(self, text: Any, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
            raise NoTokenizerError("tokenizer.ggml.model = no_vocab: no text")

    opened(WithoutTokenizer(tmp_path / "m.gguf", has_tokenizer=False))
    result = run("tokenize", "m.gguf", "a")
    assert result.exit_code == 1
    assert result.stderr.startswith("xllm: tokenizer.ggml.model = no_vocab: no text; ")


def test_inspect_shows_what_was_inferred_with_its_source(opened: Open) -> None:
    found = json.loads(run("inspect", "m.gguf", "--json").stdout)
    assert found["model"]["architecture"] == "fake"
    assert found["facts"] == [{"name": "pretokenizer", "value": "bytes", "source": "a test"}]
    assert found["end_tokens"] == [{"token_id": 0, "text": "<|end|>", "source": "a test"}]
    assert found["metadata"][1] == {"key": "fake.rope.freq_base", "type": "float32", "value": 500000.0}
    assert found["tensor_types"] == [{"type": "q4_1", "num_tensors": 1, "size_bytes": 4000}]
    assert found["plan"]["kv_bytes_per_token"] == PLAN.kv_bytes_per_token
    assert found["chat_template"]["problem"] == ""


def test_inspect_prints_tables_for_people(opened: Open) -> None:
    text = run("inspect", "m.gguf").stdout
    for part in ("architecture", "pretokenizer", "<|end|>", "q4_1", "fake.rope.freq_base", "65,536", "compiles"):
        assert part in text


def test_inspect_makes_the_plan_with_the_settings(opened: Open, tmp_path: Path) -> None:
    asked: list[Any] = []

    class Planning(FakeModel):
        def plan(self, config: object = None) -> Plan:
            asked.append(config)
            return PLAN

    opened(Planning(tmp_path / "m.gguf"))
    assert run("inspect", "m.gguf", "--max-slots", "5", "--kv-type", "int8", "--json").exit_code == 0
    assert (asked[0].max_slots, asked[0].kv_type.name) == (5, "INT8")


def test_inspect_shows_a_file_that_no_engine_can_run(opened: Open, tmp_path: Path) -> None:
    class WithoutPlan(FakeModel):
        def plan(self, config: object = None) -> Plan:
            raise MemoryLimitError("does not fit")

        def tensors(self) -> list[TensorInfo]:
            return []

    opened(WithoutPlan(tmp_path / "m.gguf"))
    found = json.loads(run("inspect", "m.gguf", "--json").stdout)
    assert found["plan"] is None
    assert found["plan_problem"] == "does not fit"
    text = run("inspect", "m.gguf").stdout
    assert "does not fit" in text


def test_text_of_a_file_is_neither_markup_nor_control(opened: Open, tmp_path: Path) -> None:
    opened(FakeModel(tmp_path / "m.gguf", name="[red]x[/red]\x1b[2J"))
    text = run("inspect", "m.gguf").stdout
    assert "[red]x[/red]␛[2J" in text
    assert "\x1b" not in text


def test_tensor_types_are_summed_with_the_largest_share_first() -> None:
    tensors = [TensorInfo("a", "f32", (1,), 4, 0), TensorInfo("b", "q8_0", (32,), 34, 0)] * 2
    assert tensor_types(tensors) == [
        {"type": "q8_0", "num_tensors": 2, "size_bytes": 68},
        {"type": "f32", "num_tensors": 2, "size_bytes": 8},
    ]
