"""What a request may hold: every field at its edges, and just past them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from xllm_client.v1 import chat_pb2, generation_service_pb2
from xllm_service.errors import InvalidFieldError
from xllm_service.validation import DecodeChoices, RequestLimits, validate, validate_chat

LIMITS = RequestLimits(num_head_rows=100)
INF, NAN = float("inf"), float("nan")
USER = {"role": "user", "parts": [{"text": "hi"}]}


def check(server: RequestLimits = LIMITS, /, **fields: Any) -> DecodeChoices:
    fields.setdefault("text", "x")
    return validate(generation_service_pb2.GenerationSpec(**fields), server).choices


def test_what_is_not_set_has_its_neutral_default() -> None:
    request = check()
    assert (request.temperature, request.top_k, request.top_p, request.min_p) == (0, 0, 1, 0)
    assert (request.repetition_penalty, request.frequency_penalty, request.presence_penalty) == (1, 0, 0)
    assert (request.seed, request.max_tokens, request.min_tokens, request.top_logprobs) == (None, None, 0, None)
    assert not request.wants_tokens
    prompt = validate(generation_service_pb2.GenerationSpec(text="x"), LIMITS).prompt
    assert (prompt.add_special_tokens, prompt.parse_special) == (None, False)
    assert (request.max_queue_s, request.max_duration_s, request.priority) == (None, None, 0)


def test_the_servers_defaults_fill_in() -> None:
    request = check(RequestLimits(100, default_max_tokens=7, default_queue_s=2.0))
    assert (request.max_tokens, request.max_queue_s) == (7, 2.0)


def test_more_outputs_than_there_are_places_for_are_refused_by_the_limit() -> None:
    limits = RequestLimits(100, num_places=4)
    assert validate(generation_service_pb2.GenerationSpec(text="x", num_outputs=4), limits).num_outputs == 4
    with pytest.raises(InvalidFieldError, match="at most 4, this server's max_slots") as caught:
        check(limits, num_outputs=5)
    assert [path for path, _ in caught.value.violations()] == ["spec.num_outputs"]


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("temperature", 0.0, 100.0),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("frequency_penalty", -100.0, 100.0),
        ("presence_penalty", -100.0, 100.0),
    ],
)
def test_sampling_numbers_have_closed_ranges(name: str, low: float, high: float) -> None:
    for value in (low, high):
        assert getattr(check(sampling={name: value}), name) == value
    for value in (low - 0.01, high + 0.01, NAN, INF, -INF, -1e30):
        with pytest.raises(InvalidFieldError) as caught:
            check(sampling={name: value})
        assert caught.value.violations()[0][0] == f"spec.sampling.{name}"


@pytest.mark.parametrize("value", [0.0, -0.5, NAN, INF, 100.5])
def test_the_repetition_penalty_is_above_zero(value: float) -> None:
    with pytest.raises(InvalidFieldError):
        check(sampling={"repetition_penalty": value})
    assert check(sampling={"repetition_penalty": 1e-3}).repetition_penalty == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"sampling": {"top_k": -5}}, "spec.sampling.top_k"),
        ({"limits": {"max_tokens": 0}}, "spec.limits.max_tokens"),
        ({"limits": {"max_tokens": -1}}, "spec.limits.max_tokens"),
        ({"limits": {"max_tokens": 2**31}}, "spec.limits.max_tokens"),
        ({"limits": {"max_queue_time": {"seconds": 0}}}, "spec.limits.max_queue_time"),
        ({"limits": {"max_duration": {"seconds": -1}}}, "spec.limits.max_duration"),
        ({"limits": {"max_duration": {"seconds": 2**62}}}, "spec.limits.max_duration"),
        ({"limits": {"max_duration": {"nanos": 2 * 10**9}}}, "spec.limits.max_duration"),
        ({"stop": {"min_tokens": -1}}, "spec.stop.min_tokens"),
        ({"stop": {"min_tokens": 6}, "limits": {"max_tokens": 5}}, "spec.stop.min_tokens"),
        ({"stop": {"strings": ["a"] * 17}}, "spec.stop.strings"),
        ({"stop": {"strings": ["a", "b" * 257]}}, "spec.stop.strings[1]"),
        ({"stop": {"token_ids": [1] * 65}}, "spec.stop.token_ids"),
        ({"stop": {"token_ids": [-1]}}, "spec.stop.token_ids[0]"),
        ({"output": {"top_logprobs": 21}}, "spec.output.top_logprobs"),
        ({"output": {"top_logprobs": 100}}, "spec.output.top_logprobs"),
        ({"output": {"top_logprobs": -1}}, "spec.output.top_logprobs"),
        ({"sampling": {"logit_bias": {100: 0.0}}}, "spec.sampling.logit_bias[100]"),
        ({"sampling": {"logit_bias": {1: NAN}}}, "spec.sampling.logit_bias[1]"),
        ({"sampling": {"logit_bias": {1: INF}}}, "spec.sampling.logit_bias[1]"),
        ({"sampling": {"logit_bias": dict.fromkeys(range(1025), 0.0)}}, "spec.sampling.logit_bias"),
        ({"priority": 101}, "spec.priority"),
        ({"num_outputs": 0}, "spec.num_outputs"),
        ({"num_outputs": 10**6}, "spec.num_outputs"),
        ({"decode_mode": 7}, "spec.decode_mode"),
        ({"request_id": "a b"}, "spec.request_id"),
        ({"request_id": "a" * 129}, "spec.request_id"),
        ({"request_id": "line\n"}, "spec.request_id"),
        ({"expected_digest": "sha256:0"}, "spec.expected_digest"),
        ({"text": None, "token_ids": {"ids": []}}, "spec.token_ids.ids"),
        ({"text": None, "token_ids": {"ids": [0, 99, 100]}}, "spec.token_ids.ids[2]"),
        ({"text": None, "token_ids": {"ids": [-1]}}, "spec.token_ids.ids[0]"),
        ({"text": None, "token_ids": {"ids": [2**31]}}, "spec.token_ids.ids[0]"),
        ({"text": None}, "spec.input"),
    ],
)
def test_each_limit_names_its_field(fields: dict[str, Any], path: str) -> None:
    fields = {"text": "x", **fields}
    with pytest.raises(InvalidFieldError) as caught:
        validate(generation_service_pb2.GenerationSpec(**fields), LIMITS)
    assert [violated for violated, _ in caught.value.violations()] == [path]


def test_edges_that_are_allowed() -> None:
    request = check(
        sampling={"top_k": 2**62, "logit_bias": {0: -INF}, "seed": 2**64 - 1},
        stop={"strings": ["a" * 256] * 16, "token_ids": [99] * 64, "min_tokens": 5},
        limits={"max_tokens": 5, "max_duration": {"nanos": 1}},
        output={"top_logprobs": 0},
        num_outputs=1,
    )
    assert request.top_k == 0, "at least the vocabulary: off"
    assert (request.seed, request.top_logprobs, request.wants_tokens) == (2**64 - 1, 0, True)


def test_all_violations_are_told_at_once() -> None:
    with pytest.raises(InvalidFieldError) as caught:
        check(sampling={"temperature": -1.0, "top_p": 2.0}, limits={"max_tokens": 0})
    assert len(caught.value.violations()) == 3


# ---- chat ----


def chat(**fields: Any) -> Any:
    return validate_chat(chat_pb2.Chat(**{"messages": [USER], **fields}), 3)


def test_a_conversation_is_what_transformers_would_get() -> None:
    call = {"id": "c1", "name": "add", "arguments_json": '{"b": 5, "a": 2.0}'}
    messages = [
        {"role": "user", "parts": [{"text": "a"}, {"text": "b"}]},
        {"role": "assistant", "tool_calls": [call], "reasoning_text": "hm"},
        {"role": "tool", "parts": [{"text": "7"}], "tool_call_id": "c1", "name": "add"},
    ]
    conversation = chat(
        messages=messages, tools_json='[{"z": 1, "a": 2}]', template_args_json='{"enable_thinking": false}'
    )
    assert conversation.messages == [
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"b": 5, "a": 2.0}}}
            ],
            "reasoning_content": "hm",
        },
        {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "add"},
    ]
    arguments = conversation.messages[1]["tool_calls"][0]["function"]["arguments"]
    assert json.dumps(arguments) == '{"b": 5, "a": 2.0}', "key order and number forms are kept"
    assert list(conversation.tools[0]) == ["z", "a"]
    assert conversation.arguments == {"enable_thinking": False}
    assert conversation.add_generation_prompt


def test_no_tools_in_either_spelling() -> None:
    assert chat(tools_json="").tools == chat(tools_json="[]").tools == []
    assert chat(tool_choice_json='"auto"').arguments == {"tool_choice": "auto"}
    assert chat(tools_json=r'["\ud83d\ude00"]').tools == ["\N{GRINNING FACE}"]
    assert not chat(add_generation_prompt=False).add_generation_prompt


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"messages": []}, "chat.messages"),
        ({"messages": [USER] * 4}, "chat.messages"),
        ({"messages": [{"role": "", "parts": [{"text": "x"}]}]}, "chat.messages[0].role"),
        ({"messages": [{"role": "<|user|>"}]}, "chat.messages[0].role"),
        ({"messages": [{"role": "user", "parts": [{}]}]}, "chat.messages[0].parts[0]"),
        ({"messages": [{"role": "a", "tool_calls": [{"name": ""}]}]}, "chat.messages[0].tool_calls[0].name"),
        (
            {"messages": [{"role": "a", "tool_calls": [{"name": "f", "arguments_json": "5"}]}]},
            "chat.messages[0].tool_calls[0].arguments_json",
        ),
        ({"tools_json": "{}"}, "chat.tools_json"),
        ({"tools_json": "[" * 60_000}, "chat.tools_json"),
        ({"tools_json": "[NaN]"}, "chat.tools_json"),
        ({"tools_json": r'["\ud800"]'}, "chat.tools_json"),
        ({"template_args_json": r'{"\udfff": "\ud83d\ude00"}'}, "chat.template_args_json"),
        ({"tool_choice_json": "5"}, "chat.tool_choice_json"),
        ({"template_args_json": '{"messages": []}'}, "chat.template_args_json"),
        ({"template_args_json": '{"bos_token": ""}'}, "chat.template_args_json"),
        ({"template_args_json": "not json"}, "chat.template_args_json"),
    ],
)
def test_each_part_of_a_chat_names_its_field(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        chat(**fields)
    assert [violated for violated, _ in caught.value.violations()] == [path]
