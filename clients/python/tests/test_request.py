"""From arguments to messages."""

from __future__ import annotations

from typing import Any, cast

import pytest

from xllm_client import DecodeMode
from xllm_client.request import chat_spec, generation_spec
from xllm_client.types import ChatOptions, GenerateOptions
from xllm_client.v1 import chat_pb2, decode_mode_pb2, generation_service_pb2, slot_pb2


def test_nothing_given_leaves_everything_unset() -> None:
    assert generation_spec("Hi", {}) == generation_service_pb2.GenerationSpec(text="Hi")


def test_zero_is_sent_and_differs_from_unset() -> None:
    spec = generation_spec("Hi", {"temperature": 0.0, "top_k": 0, "seed": 0, "top_logprobs": 0, "min_tokens": 0})
    assert spec.sampling.HasField("temperature")
    assert spec.sampling.HasField("top_k")
    assert spec.sampling.HasField("seed")
    assert spec.output.HasField("top_logprobs")
    assert spec.stop.HasField("min_tokens")
    assert not spec.sampling.HasField("top_p")


EXAMPLES: dict[str, Any] = {
    "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.25, "repetition_penalty": 1.5, "frequency_penalty": 0.5,
    "presence_penalty": 0.5, "logit_bias": {4: -1.5}, "seed": 2**64 - 1, "max_tokens": 9, "min_tokens": 2,
    "stop": "END", "stop_token_ids": [5], "ignore_eos": True, "regex": "a+", "token_ids": True, "top_logprobs": 2,
    "request_id": "r", "model": "m", "expected_digest": "sha256:0", "add_special_tokens": False,
    "parse_special": True, "decode_mode": DecodeMode.PER_SLOT, "slot": slot_pb2.SlotRef(name="s", epoch=3),
    "cache_salt": "x", "cache_bypass": True, "max_queue_time_s": 1.5, "max_duration_s": 0.25, "priority": -3,
    "num_outputs": 2,
}  # fmt: skip


def test_every_option_reaches_its_field() -> None:
    spec = generation_spec("Hi", cast("GenerateOptions", EXAMPLES))
    assert generation_service_pb2.GenerationSpec(
        text="Hi",
        request_id="r",
        model="m",
        expected_digest="sha256:0",
        decode_mode=decode_mode_pb2.DECODE_MODE_PER_SLOT,
        slot=EXAMPLES["slot"],
        priority=-3,
        num_outputs=2,
        text_options={"add_special_tokens": False, "parse_special": True},
        sampling={
            name: EXAMPLES[name]
            for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty",
                         "presence_penalty", "logit_bias", "seed")
        },
        stop={"strings": ["END"], "token_ids": [5], "ignore_eos": True, "min_tokens": 2},
        constraint={"regex": "a+"},
        output={"token_ids": True, "top_logprobs": 2},
        cache={"salt": "x", "bypass": True},
        limits={
            "max_tokens": 9,
            "max_queue_time": {"seconds": 1, "nanos": 500_000_000},
            "max_duration": {"nanos": 250_000_000},
        },
    ) == spec  # fmt: skip


def test_the_examples_above_leave_no_option_out() -> None:
    other = {"json_schema", "grammar", "choice", "json_object", "timeout_s"}
    assert EXAMPLES.keys() | other == GenerateOptions.__optional_keys__


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"json_schema": {"type": "object", "b": 5, "a": 1.0}}, "json_schema"),
        ({"grammar": "start: /a/"}, "grammar"),
        ({"choice": ["yes", "no"]}, "choice"),
        ({"choice": []}, "choice"),
        ({"json_object": True}, "json_object"),
        ({"json_object": False}, None),
    ],
)
def test_constraints(options: dict[str, Any], kind: str | None) -> None:
    spec = generation_spec("Hi", cast("GenerateOptions", options))
    assert spec.constraint.WhichOneof("kind") == kind
    if kind == "json_schema":
        assert spec.constraint.json_schema == '{"type": "object", "b": 5, "a": 1.0}'


def test_two_constraints_exclude_each_other() -> None:
    with pytest.raises(TypeError, match="regex and grammar"):
        generation_spec("Hi", {"regex": "a", "grammar": "b"})


def test_a_misspelt_option_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="unknown option max_token;"):
        generation_spec("Hi", {"max_token": 3})  # type: ignore[typeddict-unknown-key]


def test_token_prompt_also_when_it_is_empty() -> None:
    assert list(generation_spec([1, -1, 2**31], {}).token_ids.ids) == [1, -1, 2**31]
    assert generation_spec([], {}).WhichOneof("input") == "token_ids"


def test_json_text_keeps_order_numbers_and_characters() -> None:
    options: ChatOptions = {
        "tools": [{"name": "it's <b>", "b": 5, "a": [1, 2.0, True, None], "u": "é/—"}],
        "tool_choice": '"none"',
        "template_args": {"enable_thinking": False},
        "add_generation_prompt": False,
        "max_tokens": 3,
    }
    spec = chat_spec([{"role": "user", "content": "Hi"}], options)
    assert spec.chat.tools_json == '[{"name": "it\'s <b>", "b": 5, "a": [1, 2.0, true, null], "u": "é/—"}]'
    assert spec.chat.tool_choice_json == '"none"'
    assert spec.chat.template_args_json == '{"enable_thinking": false}'
    assert spec.chat.HasField("add_generation_prompt")
    assert spec.limits.max_tokens == 3


def test_messages() -> None:
    own = chat_pb2.ChatMessage(role="system", parts=[chat_pb2.Part(text="Be brief")])
    call = {"id": "1", "name": "f", "arguments_json": "{}"}
    spec = chat_spec(
        [
            own,
            {"role": "user", "content": ["a", "b"]},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_text": "hm"},
            {"role": "tool", "content": "", "tool_call_id": "1", "name": "f"},
        ],
        {},
    )
    system, user, assistant, tool = spec.chat.messages
    assert system == own
    assert [part.text for part in user.parts] == ["a", "b"]
    assert (len(assistant.parts), assistant.tool_calls[0].name, assistant.reasoning_text) == (0, "f", "hm")
    assert (tool.tool_call_id, tool.name) == ("1", "f")
    with pytest.raises(TypeError, match="unknown option images"):
        chat_spec([{"role": "user", "images": []}], {})
