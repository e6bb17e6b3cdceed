"""GenerationService over a real connection: the order of events, how it ends, and what is given back."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import time
from dataclasses import replace
from typing import Any

import grpc
import pytest

from cyengine.types import Candidate, FinishReason, Status
from tests.service.conftest import Serve, eventually
from tests.service.fake_engine import END, FakeEngine, ids_of
from xllm_client import (
    AlreadyExistsError,
    AsyncClient,
    CallCancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    QueueFullError,
    ResourceExhaustedError,
    UnavailableError,
    XllmError,
)
from xllm_client.v1 import generation_pb2, generation_service_pb2, sampling_pb2
from xllm_service.admission import MAX_RECEIPTS, RECEIPT_TTL_S, LiveGeneration, LiveGenerations
from xllm_service.app import Server
from xllm_service.errors import ServiceError


async def events_of(generation: Any) -> list[tuple[str, Any]]:
    return [(event.kind, event.message) async for event in generation]


async def test_events_come_in_the_order_of_the_contract(client: AsyncClient, engine: FakeEngine) -> None:
    generation = client.generate("hello", max_tokens=9, request_id="mine")
    await eventually(lambda: engine.live)
    engine.accept()
    engine.prefill(3)
    await eventually(lambda: generation.accepted or True)
    reading = asyncio.create_task(events_of(generation))
    await eventually(lambda: generation.accepted)
    engine.token(1, "a")
    engine.finish(reason=FinishReason.EOS)
    events = await reading
    assert [kind for kind, _ in events] == ["accepted", "prefill_progress", "delta", "output_finished", "finished"]
    assert [message.sequence for _, message in events] == [0, 1, 2, 3, 4]
    accepted = events[0][1].accepted
    assert (accepted.request_id, accepted.model, accepted.num_prompt_tokens) == ("mine", "fake", 5)
    assert accepted.slot.name == "fake/2" and accepted.slot.epoch == 5 and not accepted.slot.secret
    assert accepted.effective.sampling.seed == 77
    assert accepted.effective.limits.max_tokens == 9
    assert accepted.effective.sampling.top_p == 1.0 and accepted.effective.sampling.HasField("top_k")
    assert list(accepted.effective.sampler_order)[:2] == [
        sampling_pb2.SAMPLER_STAGE_LOGIT_BIAS,
        sampling_pb2.SAMPLER_STAGE_PENALTIES,
    ]
    finished = events[3][1].output_finished
    assert (finished.reason, finished.stop_token_id) == (generation_pb2.FINISH_REASON_EOS, END)
    assert events[4][1].finished.usage.num_generated_tokens == 1
    assert engine.submitted[1].prompt == ids_of("hello")


async def test_nothing_is_sent_before_accepted(client: AsyncClient, engine: FakeEngine) -> None:
    stub = client._generation
    call = stub.Generate(generation_service_pb2.GenerateRequest(spec={"text": "x"}))
    metadata = asyncio.ensure_future(call.initial_metadata())
    await eventually(lambda: engine.live)
    assert not metadata.done()
    engine.accept()
    await metadata
    call.cancel()


async def test_a_fast_reader_gets_one_token_per_delta(client: AsyncClient, engine: FakeEngine) -> None:
    generation = client.generate("x")
    await eventually(lambda: engine.live)
    engine.accept()
    assert (await anext(generation)).kind == "accepted"
    for letter in "abc":
        engine.token(1, letter)
        event = await anext(generation)
        assert (event.message.delta.text, event.message.delta.num_tokens) == (letter, 1)
    generation.close()


async def test_several_streams_share_wake_ups_where_the_engine_needs_every_core(
    serve: Serve, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_INTERVAL_PER_STREAM_S", "_LONGEST_INTERVAL_S"):
        monkeypatch.setattr(f"xllm_service.engine.engine_streams.{name}", 3600.0)
    engine.info = replace(engine.info, num_threads=4096)
    async with serve() as (server, client):
        streams = []
        for number in (1, 2):
            streams.append(client.generate("x"))
            await eventually(lambda: engine.live[-1:] == [number])  # noqa: B023  # called at once
            engine.accept(number)
            assert (await anext(streams[-1])).kind == "accepted"

        async def read(number: int) -> tuple[str, int]:
            delta = (await anext(streams[number - 1])).message.delta
            return delta.text, delta.num_tokens

        for letter in "abc":  # one alone never waits
            engine.token(1, letter)
            assert await read(1) == (letter, 1)
        for number in (1, 2):
            engine.token(number, "d")
        assert [await read(1), await read(2)] == [("d", 1), ("d", 1)]
        for number in (1, 2, 1):
            engine.token(number, "e")
        await client.load()
        assert engine.num_waiting_events == 3
        beside: Any = server.served.roster.first.engine
        beside._end_rest()
        assert [await read(1), await read(2)] == [("ee", 2), ("e", 1)]
        # Where masks are wanted events are taken at once, and handed out as seldom.
        beside._end_rest()
        beside._constrained[99] = None
        for number in (1, 2):
            engine.token(number, "f")
        assert [await read(1), await read(2)] == [("f", 1), ("f", 1)]
        for number in (1, 2, 1):
            engine.token(number, "g")
            await eventually(lambda: engine.num_waiting_events == 0)
        assert len(beside._taken) == 3
        beside._end_rest()
        assert [await read(1), await read(2)] == [("gg", 2), ("g", 1)]
        for stream in streams:
            stream.close()


async def test_generate_once_has_the_same_bytes_as_the_stream(client: AsyncClient, engine: FakeEngine) -> None:
    engine.answer = ["Gr", "üß", "e", ""]
    streamed = await client.generate("x", top_logprobs=0).result()
    whole = await client.generate_once("x", top_logprobs=0)
    assert whole.text == streamed.text == "Grüße"
    assert whole.outputs[0].tokens == streamed.outputs[0].tokens
    assert whole.outputs[0].finished == streamed.outputs[0].finished
    assert whole.usage == streamed.usage


async def test_text_that_was_held_back_arrives_with_the_end(client: AsyncClient, engine: FakeEngine) -> None:
    generation = client.generate("x")
    await eventually(lambda: engine.live)
    engine.accept()
    engine.token(1, "")
    engine.finish(text="held")
    assert (await generation.result()).text == "held"


async def test_token_records_only_where_asked_for(client: AsyncClient, engine: FakeEngine) -> None:
    generation = client.generate("x", top_logprobs=2)
    await eventually(lambda: engine.live)
    engine.accept()
    candidates = [Candidate(ids_of("b")[0], -0.5), Candidate(ids_of("a")[0], -1.0)]
    engine.token(1, "a", logprob=-1.0, candidates=candidates)
    engine.token(1, "", token_id=END, logprob=-2.0)
    engine.finish()
    tokens = (await generation.result()).outputs[0].tokens
    assert [(t.id, t.piece, t.rank) for t in tokens] == [(ids_of("a")[0], b"a", 2), (END, b"", 0)]
    assert [c.piece for c in tokens[0].candidates] == [b"b", b"a"]
    engine.answer = ["a"]
    assert not (await client.generate_once("x")).outputs[0].tokens


async def test_the_stop_string_that_matched_is_named(client: AsyncClient, engine: FakeEngine) -> None:
    generation = client.generate("x", stop=["no", "yes"])
    await eventually(lambda: engine.live)
    engine.accept()
    engine.finish(reason=FinishReason.STOP_STRING, matched_stop=1)
    finished = (await generation.result()).outputs[0].finished
    assert (finished.reason, finished.stop_string) == (generation_pb2.FINISH_REASON_STOP_STRING, "yes")


async def test_every_option_reaches_the_engine(client: AsyncClient, engine: FakeEngine) -> None:
    engine.answer = []
    await client.generate_once(
        [5, 6], temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, repetition_penalty=1.5, frequency_penalty=-1.0,
        presence_penalty=2.0, seed=0, max_tokens=7, min_tokens=2, ignore_eos=True, stop_token_ids=[9],
        logit_bias={4: -1.0}, top_logprobs=1, max_queue_time_s=3.5, max_duration_s=2.5, priority=-3,
    )  # fmt: skip
    request = engine.submitted[1]
    sampling = request.sampling
    assert list(request.prompt) == [5, 6]
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 3, 0.25, 0.125)
    assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) == (1.5, -1.0, 2.0)
    assert (sampling.seed, request.max_tokens, request.min_tokens, request.ignore_eos) == (0, 7, 2, True)
    assert (list(request.stop_token_ids), dict(request.logit_bias), request.num_logprobs) == ([9], {4: -1.0}, 1)
    assert (request.max_queue_s, request.priority) == (3.5, -3)
    assert 2.0 < request.max_duration_s < 2.5, "counted from the call's arrival"


async def test_chat_text_cannot_spell_control_tokens(client: AsyncClient, engine: FakeEngine) -> None:
    engine.answer = ["ok"]
    await client.chat_once([{"role": "user", "content": "a<|assistant|>"}])
    assert list(engine.submitted[1].prompt) == [1, *ids_of("a<|assistant|>"), 2]


async def test_progress_comes_at_most_twice_a_second(client: AsyncClient, engine: FakeEngine) -> None:
    generation = client.generate("hello")
    await eventually(lambda: engine.live)
    engine.accept()
    assert (await anext(generation)).kind == "accepted"
    for number in range(1, 5):
        engine.prefill(number)
        await eventually(lambda: not engine.num_waiting_events)  # each is seen on its own
    engine.token(1, "a")
    engine.finish()
    assert [event.kind async for event in generation].count("prefill_progress") == 1


# ---- refusals ----


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"temperature": float("nan")}, "spec.sampling.temperature"),
        ({"top_p": -1.0}, "spec.sampling.top_p"),
        ({"max_tokens": 0}, "spec.limits.max_tokens"),
        ({"stop": [""]}, "spec.stop.strings[0]"),
        ({"stop_token_ids": [1, 100000]}, "spec.stop.token_ids[1]"),
    ],
)
async def test_a_bad_field_is_named(client: AsyncClient, engine: FakeEngine, options: Any, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await client.generate("x", **options).result()
    assert [violation.field for violation in caught.value.field_violations] == [field]
    assert caught.value.reason == "INVALID_FIELD"
    assert not engine.submitted


async def test_a_slot_is_refused_not_ignored(client: AsyncClient) -> None:
    request = generation_service_pb2.GenerateOnceRequest(spec={"text": "x", "slot": {"name": "fake/0"}})
    with pytest.raises(grpc.RpcError) as caught:
        await client._generation.GenerateOnce(request)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND, "the fake engine has no slots"


async def test_a_prompt_too_long_says_how_long(client: AsyncClient) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await client.generate_once("x" * 300)
    assert caught.value.reason == "PROMPT_TOO_LONG"
    assert caught.value.metadata == {"num_prompt_tokens": "300", "max_seq_len": "256"}


async def test_an_empty_prompt_is_refused(client: AsyncClient) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await client.generate_once("")
    assert caught.value.field_violations[0].field == "spec.text"


async def test_a_full_queue_says_when_to_come_back(client: AsyncClient, engine: FakeEngine) -> None:
    engine.max_queue = 0
    with pytest.raises(QueueFullError) as caught:
        await client.generate_once("x")
    assert caught.value.retry_delay_s == 1.0
    assert caught.value.metadata["queue_limit"] == "0"


async def test_an_unknown_model_is_named(client: AsyncClient) -> None:
    with pytest.raises(NotFoundError) as caught:
        await client.generate_once("x", model="other")
    assert caught.value.reason == "MODEL_NOT_FOUND"


async def test_the_digest_is_checked(client: AsyncClient, engine: FakeEngine) -> None:
    engine.answer = ["ok"]
    with pytest.raises(FailedPreconditionError) as caught:
        await client.generate_once("x", expected_digest="sha256:" + "0" * 64)
    assert caught.value.reason == "MODEL_DIGEST_MISMATCH"
    actual = caught.value.metadata["actual"]
    result = await client.generate_once("x", expected_digest=actual)
    assert result.accepted.model_digest == actual


async def test_no_tokenizer_leaves_token_ids(serve: Serve, engine: FakeEngine) -> None:
    engine.answer = ["ok"]
    async with serve(info={"has_tokenizer": False, "chat_template": ""}) as (_, client):
        with pytest.raises(FailedPreconditionError) as caught:
            await client.generate_once("x")
        assert caught.value.reason == "NO_TOKENIZER"
        assert caught.value.metadata == {"key": "tokenizer.ggml.pre", "flag": "--pretokenizer"}
        with pytest.raises(FailedPreconditionError) as caught:
            await client.chat_once([{"role": "user", "content": "x"}])
        assert caught.value.reason == "NO_CHAT_TEMPLATE"
        assert (await client.generate_once([5])).text == "ok"


async def test_without_a_process_to_render_it_a_conversation_may_be_tried_again(
    serve: Serve, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_processes(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    engine.answer = ["ok"]
    ask = [{"role": "user", "content": "x"}]
    async with serve() as (_, client):
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", no_processes)
            for call in (client.chat_once(ask), client.render_chat(ask)):
                with pytest.raises(UnavailableError, match=r"does not start: .*; retry later") as caught:
                    await call
                assert caught.value.reason == "RENDERER_UNAVAILABLE" and caught.value.retry_delay_s
        assert (await client.chat_once(ask)).text == "ok"


async def test_a_process_that_dies_in_its_imports_is_no_fault_of_the_template_or_the_constraint(
    serve: Serve, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = subprocess.Popen

    def without_packages(command: list[str], **options: Any) -> Any:
        return start([*command[:-1], "/nowhere"], **options)

    engine.answer = ["ok"]
    ask = [{"role": "user", "content": "x"}]
    async with serve() as (_, client):
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", without_packages)
            with pytest.raises(UnavailableError, match=r"ModuleNotFoundError \(minijinja\)") as caught:
                await client.chat_once(ask)
            assert caught.value.reason == "RENDERER_UNAVAILABLE"
            with pytest.raises(UnavailableError, match=r"ModuleNotFoundError \(llguidance\)") as caught:
                await client.generate_once("x", regex="ab")
            assert caught.value.reason == "COMPILER_UNAVAILABLE"
        assert (await client.chat_once(ask)).text == "ok"


async def test_a_template_that_refuses_gives_its_own_words(serve: Serve) -> None:
    async with serve(info={"chat_template": "{{ raise_exception('only users') }}"}) as (_, client):
        with pytest.raises(InvalidArgumentError, match="only users") as caught:
            await client.chat_once([{"role": "user", "content": "x"}])
        assert caught.value.reason == "TEMPLATE_REFUSED"


# ---- endings ----


async def test_a_failure_later_ends_the_stream_with_its_usage(client: AsyncClient, engine: FakeEngine) -> None:
    generation = client.generate("hello")
    await eventually(lambda: engine.live)
    engine.accept()
    engine.token(1, "a")
    engine.finish(status=Status.NON_FINITE_LOGITS, message="logits for position 6 hold NaN")
    with pytest.raises(InternalError) as caught:
        await generation.result()
    assert caught.value.reason == "NON_FINITE_LOGITS"
    assert caught.value.usage is not None
    assert (caught.value.usage.num_prompt_tokens, caught.value.usage.num_generated_tokens) == (5, 1)


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("moment", ["queued", "accepted", "decoding"])
async def test_a_client_that_goes_away_gives_its_slot_back(
    client: AsyncClient, server: Server, engine: FakeEngine, once: bool, moment: str
) -> None:
    call: Any = asyncio.ensure_future(client.generate_once("x")) if once else client.generate("x")
    await eventually(lambda: engine.live)
    if moment != "queued":
        engine.accept()
    if moment == "decoding":
        engine.token(1, "a")
    if not once and moment != "queued":
        await anext(call)
    call.cancel() if once else call.close()
    await eventually(lambda: engine.cancelled == [1])
    await eventually(lambda: server.gate.num_calls == 0)
    assert not server.served.generations
    assert server.served.get("").engine.num_streams == 0


async def test_the_deadline_reaches_the_engine_and_ends_the_call(client: AsyncClient, engine: FakeEngine) -> None:
    generation = client.generate("x", timeout_s=0.3)
    await eventually(lambda: engine.live)
    assert 0 < engine.submitted[1].max_duration_s <= 0.31
    with pytest.raises(DeadlineExceededError):
        await generation.result()
    await eventually(lambda: engine.cancelled == [1])


async def test_max_duration_after_accepted_is_an_ordinary_end(client: AsyncClient, engine: FakeEngine) -> None:
    generation = client.generate("x", max_duration_s=5.0)
    await eventually(lambda: engine.live)
    engine.accept()
    engine.token(1, "a")
    engine.finish(status=Status.DEADLINE_EXCEEDED, message="max_duration_s is over")
    result = await generation.result()
    assert result.text == "a"
    assert result.outputs[0].finished.reason == generation_pb2.FINISH_REASON_MAX_DURATION


async def test_max_duration_before_accepted_is_a_failure(client: AsyncClient, engine: FakeEngine) -> None:
    generation = client.generate("x", max_duration_s=5.0)
    await eventually(lambda: engine.live)
    engine.finish(status=Status.DEADLINE_EXCEEDED, message="max_duration_s is over")
    with pytest.raises(DeadlineExceededError):
        await generation.result()


# ---- request ids ----


async def test_cancel_generation_ends_the_call_and_frees_the_slot(client: AsyncClient, engine: FakeEngine) -> None:
    generation = client.generate("x", request_id="a")
    await eventually(lambda: engine.live)
    engine.accept()
    await anext(generation)
    stub = client._generation
    reply = await stub.CancelGeneration(generation_service_pb2.CancelGenerationRequest(request_id="a"))
    assert reply.state == generation_service_pb2.GENERATION_STATE_RUNNING
    with pytest.raises(CallCancelledError) as caught:
        await generation.result()
    assert caught.value.reason == "CANCELLED"
    await eventually(lambda: engine.cancelled == [1])
    reply = await stub.CancelGeneration(generation_service_pb2.CancelGenerationRequest(request_id="a"))
    assert reply.state == generation_service_pb2.GENERATION_STATE_CANCELLED


async def test_cancelling_one_leaves_the_other(client: AsyncClient, engine: FakeEngine) -> None:
    first, second = client.generate("x", request_id="a"), client.generate("x", request_id="b")
    await eventually(lambda: len(engine.live) == 2)
    by_prompt = list(engine.live)
    await client.cancel("a")
    with pytest.raises(CallCancelledError):
        await first.result()
    left = [i for i in by_prompt if i not in engine.cancelled]
    assert len(left) == 1
    engine.accept(left[0])
    engine.token(left[0], "ok")
    engine.finish(left[0])
    assert (await second.result()).text == "ok"


async def test_an_unknown_id_cannot_be_cancelled(client: AsyncClient) -> None:
    with pytest.raises(NotFoundError) as caught:
        await client.cancel("nobody")
    assert caught.value.reason == "REQUEST_NOT_FOUND"
    with pytest.raises(InvalidArgumentError):
        await client.cancel("")


async def test_a_live_id_with_another_body_is_refused(client: AsyncClient, engine: FakeEngine) -> None:
    first = client.generate("x", request_id="a")
    await eventually(lambda: engine.live)
    with pytest.raises(AlreadyExistsError) as caught:
        await client.generate_once("y", request_id="a")
    assert caught.value.reason == "REQUEST_ID_IN_USE"
    first.close()


async def test_the_same_body_again_replaces_the_first_call(client: AsyncClient, engine: FakeEngine) -> None:
    first = client.generate("x", request_id="a")
    await eventually(lambda: engine.live)
    second = client.generate("x", request_id="a")
    with pytest.raises(CallCancelledError):
        await first.result()
    await eventually(lambda: 2 in engine.live)
    engine.accept(2)
    engine.token(2, "ok")
    engine.finish(2)
    assert (await second.result()).text == "ok"


# ---- receipts ----


async def test_a_receipt_tells_of_a_live_and_of_an_ended_generation(client: AsyncClient, engine: FakeEngine) -> None:
    generation = client.generate("hello", request_id="a")
    await eventually(lambda: engine.live)
    queued = await client.get_generation("a")
    assert queued.state == generation_service_pb2.GENERATION_STATE_QUEUED
    assert not queued.HasField("status_code") and not queued.HasField("end_time")
    engine.accept()
    engine.token(1, "b")
    assert [(await anext(generation)).kind for _ in range(2)] == ["accepted", "delta"]
    running = await client.get_generation("a")
    assert running.state == generation_service_pb2.GENERATION_STATE_RUNNING
    assert (running.usage.num_prompt_tokens, running.usage.num_generated_tokens) == (5, 1)
    engine.finish()
    result = await generation.result()
    await eventually(lambda: engine.live == [])
    ended = await client.get_generation("a")
    assert (ended.state, ended.status_code) == (generation_service_pb2.GENERATION_STATE_FINISHED, 0)
    assert ended.usage == result.usage and ended.timings == result.timings
    assert list(ended.outputs) == [result.outputs[0].finished]
    assert ended.expire_time.seconds - ended.end_time.seconds in (300, 301)


@pytest.mark.parametrize(
    ("way", "state", "reason"),
    [
        ("close", generation_service_pb2.GENERATION_STATE_CANCELLED, "CANCELLED"),
        ("deadline", generation_service_pb2.GENERATION_STATE_TIMED_OUT, "DEADLINE_EXCEEDED"),
        ("failure", generation_service_pb2.GENERATION_STATE_FAILED, "NON_FINITE_LOGITS"),
    ],
)
async def test_a_receipt_has_the_usage_of_a_call_that_was_cut_short(
    client: AsyncClient, server: Server, engine: FakeEngine, way: str, state: int, reason: str
) -> None:
    generation = client.generate("hello", request_id="a", timeout_s=0.5 if way == "deadline" else 20)
    await eventually(lambda: engine.live)
    engine.accept()
    engine.token(1, "b")
    assert [(await anext(generation)).kind for _ in range(2)] == ["accepted", "delta"]
    if way == "close":
        generation.close()
    elif way == "failure":
        engine.finish(status=Status.NON_FINITE_LOGITS)
    await eventually(lambda: len(server.served.generations) == 0)
    receipt = await client.get_generation("a")
    assert (receipt.state, receipt.error_reason) == (state, reason)
    assert receipt.status_code != 0
    assert (receipt.usage.num_prompt_tokens, receipt.usage.num_generated_tokens) == (5, 1)
    assert not receipt.outputs
    # What operators count is what the receipt says.
    labels = {"method": "xllm.v1.GenerationService/Generate", "code": code_name(receipt.status_code)}
    registry = server.served.metrics.registry
    await eventually(lambda: registry.get_sample_value("xllm_calls_total", labels) == 1)


def code_name(number: int) -> str:
    return next(code.name for code in grpc.StatusCode if code.value[0] == number)


async def test_one_principal_pushes_out_no_receipt_of_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    generations = LiveGenerations()

    def end_one(owner: str, request_id: str) -> None:
        generation = LiveGeneration(request_id, owner, b"", lambda: None)
        generations.add(generation)
        generations.remove(generation, grpc.StatusCode.OK)

    end_one("quiet", "mine")
    for number in range(MAX_RECEIPTS + 10):
        end_one("busy", str(number))
    assert generations.receipt("quiet", "mine").request_id == "mine"
    assert generations.receipt("busy", "10").request_id == "10"
    with pytest.raises(ServiceError):
        generations.receipt("busy", "9")
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + RECEIPT_TTL_S + 1)
    end_one("later", "one")
    assert len(generations._ended) == 1, "receipts are gone once their time is over"


async def test_an_unknown_receipt_is_not_found(client: AsyncClient) -> None:
    with pytest.raises(NotFoundError) as caught:
        await client.get_generation("nobody")
    assert caught.value.reason == "REQUEST_NOT_FOUND"


# ---- the engine ----


async def test_a_stuck_engine_ends_waiting_calls(serve: Serve, engine: FakeEngine) -> None:
    async with serve(stuck_after=2) as (_, client):
        generation = client.generate("x")
        await eventually(lambda: engine.live)
        engine.heartbeat_age_s = 3.0
        with pytest.raises(UnavailableError) as caught:
            await generation.result()
        assert caught.value.reason == "ENGINE_FAILED"
        with pytest.raises(UnavailableError):
            await client.generate_once("x")


async def test_a_client_that_does_not_read_is_ended(serve: Serve, engine: FakeEngine) -> None:
    async with serve(stall_allowance=0.2) as (server, client):
        generation = client.generate("x", token_ids=True)
        await eventually(lambda: engine.live)
        engine.accept()
        await anext(generation)
        # Far more than flow control takes in: the write that does not return is what ends it.
        for _ in range(200):
            engine.token(1, "y" * 20_000)
            await asyncio.sleep(0)
        await eventually(lambda: engine.cancelled == [1])
        with pytest.raises(ResourceExhaustedError) as caught:
            await generation.result()
        assert caught.value.reason == "CLIENT_STALLED"
        await eventually(lambda: server.gate.num_calls == 0)


async def test_a_slow_reader_loses_nothing(client: AsyncClient, engine: FakeEngine) -> None:
    generation = client.generate("x")
    await eventually(lambda: engine.live)
    engine.accept()
    await anext(generation)
    expected = ""
    for number in range(3000):
        text = f"{number} " * 20
        expected += text
        engine.token(1, text)
        if number % 50 == 0:
            await asyncio.sleep(0)
    engine.finish()
    result = await generation.result()
    assert result.text == expected
    assert result.usage.num_generated_tokens == 3000


async def test_errors_of_our_own_do_not_leave_the_server(
    client: AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(_: object) -> int:
        raise RuntimeError("secret path /home/someone")

    monkeypatch.setattr(engine, "submit", break_down)
    with pytest.raises(XllmError) as caught:
        await client.generate_once("x")
    assert caught.value.code is grpc.StatusCode.INTERNAL
    assert caught.value.reason == "INTERNAL"
    assert "secret" not in str(caught.value)


async def test_outputs_that_end_by_themselves_are_not_cancelled(
    client: AsyncClient, engine: FakeEngine, server: Server
) -> None:
    engine.answer = ["a"]
    await client.generate_once("x", num_outputs=3)
    await eventually(lambda: len(server.served.generations) == 0)
    assert len(engine.submitted) == 3 and engine.cancelled == []
