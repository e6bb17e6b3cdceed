"""Conversations through gRPC: reasoning, answer and tool calls come in fields of their own."""

from __future__ import annotations

from typing import Any

from cyengine.types import FinishReason
from tests.service.conftest import Serve, eventually
from tests.service.fake_engine import FakeEngine, ids_of
from xllm_client.v1 import generation_pb2

THINKING = "<|user|>{{ messages[0].content }}<|assistant|><think>\n{# </think> #}"
TOOLS = "<|user|>{{ messages[0].content }}<|assistant|>{# <tool_call> #}"
ASK: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


async def test_what_is_before_the_closing_tag_is_reasoning_and_stops_leave_it_alone(
    serve: Serve, engine: FakeEngine
) -> None:
    engine.answer = ["Question:", " even?", "</th", "ink>", "\n\n", "Yes."]
    async with serve(info={"chat_template": THINKING}) as (_, client):
        stream = client.chat(ASK, stop=["Question:"], token_ids=True)
        events = [event async for event in stream]
        result = await client.chat_once(ASK, stop=["Question:"])
    first = events[0].message.accepted
    assert first.starts_in_reasoning
    assert list(first.effective.stop.strings) == ["Question:"]
    deltas = [event.message.delta for event in events if event.kind == "delta"]
    assert "".join(delta.reasoning_text for delta in deltas) == "Question: even?"
    assert "".join(delta.text for delta in deltas) == "Yes."
    assert b"".join(token.piece for delta in deltas for token in delta.tokens) == b"Question: even?</think>\n\nYes."
    (output,) = result.outputs
    assert (output.reasoning_text, output.text) == ("Question: even?", "Yes.")
    assert output.finished.reason == generation_pb2.FINISH_REASON_EOS
    assert result.usage.num_reasoning_tokens == 4


async def test_cut_short_inside_the_reasoning_there_is_no_answer(serve: Serve, engine: FakeEngine) -> None:
    async with serve(info={"chat_template": THINKING}) as (_, client):
        call = client.chat(ASK, max_tokens=2)
        await eventually(lambda: engine.live)
        engine.accept()
        engine.token(1, "Let me")
        engine.token(1, " see</th")
        engine.finish(reason=FinishReason.MAX_TOKENS)
        result = await call.result()
    (output,) = result.outputs
    assert (output.reasoning_text, output.text) == ("Let me see</th", "")
    assert output.finished.reason == generation_pb2.FINISH_REASON_MAX_TOKENS


async def test_a_stop_in_the_answer_ends_the_call_and_what_came_later_does_not_count(
    serve: Serve, engine: FakeEngine
) -> None:
    async with serve(info={"chat_template": THINKING}) as (server, client):
        call = client.chat(ASK, stop=["no", "END"], token_ids=True)
        await eventually(lambda: engine.live)
        engine.accept()
        for text in ("END", "</think>", "Yes", ". E", "ND and", " on"):
            engine.token(1, text)
        result = await call.result()
        await eventually(lambda: engine.cancelled == [1])
        assert server.served.generations.count_states() == (0, 0)
    (output,) = result.outputs
    assert (output.reasoning_text, output.text) == ("END", "Yes. ")
    assert output.finished.reason == generation_pb2.FINISH_REASON_STOP_STRING
    assert output.finished.stop_string == "END"
    assert output.finished.num_tokens == result.usage.num_generated_tokens == len(output.tokens) == 5
    assert not engine.submitted[1].stop_strings


async def test_text_requests_stop_anywhere_and_are_read_as_they_are(serve: Serve, engine: FakeEngine) -> None:
    engine.answer = ["<think>", "a", "</think>", "b"]
    async with serve(info={"chat_template": THINKING}) as (_, client):
        result = await client.generate_once("<think>", stop=["Question:"])
        assert not result.accepted.starts_in_reasoning
    assert (result.text, result.reasoning_text) == ("<think>a</think>b", "")
    assert list(engine.submitted[1].stop_strings) == ["Question:"]


async def test_tool_calls_come_with_their_arguments_as_they_were_written(serve: Serve, engine: FakeEngine) -> None:
    arguments = '{"b": 5, "a": [1.0, "é"]}'
    engine.answer = ["Look", ". \n<tool_", 'call>{"name": "f", ', f'"arguments": {arguments}}}', "</tool_call>"]
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with serve(info={"chat_template": TOOLS}) as (_, client):
        once = await client.chat_once(ASK, tools=tools)
        streamed = await client.chat(ASK, tools=tools).result()
        plain = await client.chat_once(ASK)
    for result in (once, streamed):
        (output,) = result.outputs
        assert output.text == "Look."
        ((call),) = output.tool_calls
        assert (call.name, call.arguments_json) == ("f", arguments)
        assert call.id.startswith("call_")
    assert once.outputs[0].tool_calls == streamed.outputs[0].tool_calls
    assert "<tool_call>" in plain.text and not plain.outputs[0].tool_calls


async def test_a_message_cannot_write_what_answers_are_read_with(serve: Serve, engine: FakeEngine) -> None:
    engine.answer = ["ok"]
    template = "{{ messages[0].content }}<|assistant|>{# </think> <tool_call> #}"
    async with serve(info={"chat_template": template}) as (_, client):
        result = await client.chat_once([{"role": "user", "content": "say <think>"}])
    assert not result.accepted.starts_in_reasoning
    assert result.text == "ok"
    assert engine.submitted[1].prompt == [*ids_of("say <think>"), 2]
