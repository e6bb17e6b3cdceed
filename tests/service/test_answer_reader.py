"""Reasoning, answer and tool calls: told apart the same however the output is cut into tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest

from xllm_service.answer_markers import CallForm, Markers, find_markers
from xllm_service.answer_reader import AnswerReader, Parts
from xllm_service.tool_calls import ToolCall, read_calls

THINK = Markers(("<think>", "</think>"))
TAGGED = Markers(("<think>", "</think>"), CallForm.TAGGED)
CALL = '{"name": "f", "arguments": {"b": 5, "a": [1, 2.0]}}'


def read(reader: AnswerReader, pieces: Sequence[str]) -> Parts:
    whole = Parts()
    for piece in pieces:
        whole.add(reader.feed(piece))
    whole.add(reader.finish())
    return whole


def cuts(text: str) -> list[list[str]]:
    """The text whole, in single characters, and cut anywhere."""
    draw = random.Random(text)
    cases = [[text], list(text)]
    for _ in range(20):
        at = sorted(draw.sample(range(len(text) + 1), min(3, len(text))))
        cases.append([text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)])
    return cases


@pytest.mark.parametrize(
    ("written", "starts_in", "reasoning", "answer"),
    [
        ("Question: even?</think>\n\nYes.", True, "Question: even?", "Yes."),
        ("<think>\nhm\n</think>\n\nYes.\n", False, "hm\n", "Yes.\n"),
        ("  <think>hm</think>Yes", False, "hm", "Yes"),
        ("Yes. <think> no tag here </think>", False, "", "Yes. <think> no tag here </think>"),
        ("a </thin and </think", True, "a </thin and </think", ""),
        ("all of it", True, "all of it", ""),
        ("  <th", False, "", "  <th"),
        ("</think>", True, "", ""),
        ("one</think>two</think>three", True, "one", "two</think>three"),
        ("", True, "", ""),
    ],
)
def test_reasoning_and_answer(written: str, starts_in: bool, reasoning: str, answer: str) -> None:
    for pieces in cuts(written):
        parts = read(AnswerReader(THINK, starts_in_reasoning=starts_in), pieces)
        assert (parts.reasoning, parts.text, parts.calls) == (reasoning, answer, []), pieces


@pytest.mark.parametrize(
    ("written", "answer", "calls"),
    [
        (f"<tool_call>\n{CALL}\n</tool_call>", "", 1),
        (f"I look.\n<tool_call>{CALL}</tool_call>\n<tool_call>\n{CALL}</tool_call>", "I look.", 2),
        (f"<think>x</think>\n\n<tool_call>{CALL}</tool_call>", "", 1),
        (f"<tool_call>{CALL}", "", 1),  # the closing tag was never written
        ("<tool_call>{broken</tool_call> then", "<tool_call>{broken</tool_call> then", 0),
        ("a <tool_cal", "a <tool_cal", 0),
        ("a \n ", "a \n ", 0),
    ],
)
def test_tool_calls_in_tags(written: str, answer: str, calls: int) -> None:
    for pieces in cuts(written):
        parts = read(AnswerReader(TAGGED, has_tools=True), pieces)
        assert (parts.text, len(parts.calls)) == (answer, calls), pieces
        assert all(call == ToolCall("f", '{"b": 5, "a": [1, 2.0]}') for _, call in parts.calls)
        assert [index for index, _ in parts.calls] == list(range(calls))


def test_without_tools_a_call_is_text() -> None:
    written = f"<tool_call>{CALL}</tool_call>"
    assert read(AnswerReader(TAGGED), [written]).text == written


@pytest.mark.parametrize(
    ("form", "written", "answer", "calls"),
    [
        (CallForm.BARE, ' {"name": "f", "parameters": {"b": 5, "a": [1, 2.0]}}', "", 1),
        (CallForm.BARE, ' {"answer": 42}', ' {"answer": 42}', 0),
        (CallForm.BARE, "It is { so }", "It is { so }", 0),
        (CallForm.LIST, f"[TOOL_CALLS][{CALL}, {CALL}]", "", 2),
        (CallForm.LIST, "[TOOL_CALLS] sorry", "[TOOL_CALLS] sorry", 0),
    ],
)
def test_tool_calls_in_other_forms(form: CallForm, written: str, answer: str, calls: int) -> None:
    for pieces in cuts(written):
        parts = read(AnswerReader(Markers(None, form), has_tools=True), pieces)
        assert (parts.text, len(parts.calls)) == (answer, calls), pieces
        assert all(json.loads(call.arguments) == {"b": 5, "a": [1, 2.0]} for _, call in parts.calls)


@pytest.mark.parametrize(
    ("written", "stops", "answer", "matched"),
    [
        ("Question: even?</think>\n\nYes. Question: more", ["Question:"], "Yes. ", 0),
        ("stop</think>go", ["stop"], "go", None),
        ("x</think>abcdef", ["cde", "bcde", "q"], "a", 1),  # they end at one place: the longest
        ("x</think>abcdef", ["def", "bc"], "a", 1),
        ("x</think>abab", ["abc", "ba"], "a", 1),
        ("x</think>ab", ["abc"], "ab", None),
    ],
)
def test_stops_apply_to_the_answer(written: str, stops: list[str], answer: str, matched: int | None) -> None:
    for pieces in cuts(written):
        reader = AnswerReader(THINK, starts_in_reasoning=True, stops=stops)
        parts = read(reader, pieces)
        assert (parts.text, reader.matched_stop) == (answer, matched), pieces
        assert parts.reasoning == written.partition("</think>")[0]


def test_reasoning_tokens_are_counted_up_to_the_closing_tag() -> None:
    reader = AnswerReader(THINK, starts_in_reasoning=True)
    read(reader, ["a", "b", "</th", "ink>", "c", "d"])
    assert reader.num_reasoning_tokens == 4


def test_many_pieces_of_one_call_take_linear_time() -> None:
    reader = AnswerReader(TAGGED, has_tools=True)
    text = json.dumps({"name": "f", "arguments": {"text": "x" * 200_000}})
    parts = read(reader, ["<tool_call>", *text, "</tool_call>"])
    assert len(parts.calls) == 1


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"name": 5}', '{"name": "f", "arguments": 5}', '{"name": "f"} x', "[" * 100_000, '{"name": "f",'],
)
def test_what_is_no_call(text: str) -> None:
    assert read_calls(text) is None


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_what_only_python_takes_for_json_is_no_call(value: str) -> None:
    assert read_calls(f'{{"name": "f", "arguments": {{"a": {value}}}}}') is None
    assert read_calls(f'[{{"name": "f", "arguments": {{"a": [1, {value}]}}}}]') is None
    assert read_calls(f'{{"name": "f", "arguments": "{{\\"a\\": {value}}}"}}') is None


def test_arguments_written_into_a_string_are_taken_out_of_it() -> None:
    assert read_calls('{"name": "f", "arguments": "{\\"a\\": 1}"}') == [ToolCall("f", '{"a": 1}')]
    assert read_calls('{"name": "f"}') == [ToolCall("f", "{}")]


def test_a_template_tells_its_markers() -> None:
    assert find_markers("{{ messages }}") == Markers()
    qwen = "{%- if '</think>' in content %}...<tool_call>...{%- endif %}"
    assert find_markers(qwen) == Markers(("<think>", "</think>"), CallForm.TAGGED)
    assert find_markers('{{ tools }} {"name": function, "parameters": x}').call_form is CallForm.BARE


def test_a_prompt_ends_inside_reasoning_by_its_last_tag() -> None:
    assert THINK.starts_in_reasoning(["<a><think>\n"])
    assert not THINK.starts_in_reasoning(["<think>\n\n</think>\n\n"])
    assert THINK.starts_in_reasoning(["<think>x</think> <a>", "<think>"])
    assert not THINK.starts_in_reasoning(["<", "think>"])
    assert not Markers().starts_in_reasoning(["<think>"])
