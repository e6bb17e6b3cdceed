"""Slots as a resource, over the wire and with the real engine: owners, epochs, leases, states, streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.e2e.serving import eventually, is_idle, serving, stats
from tests.e2e.slot_calls import Slots, events, events_after, failure, kinds, read, text_of
from xllm_client import AsyncClient, DecodeMode
from xllm_client.v1 import generation_pb2, generation_service_pb2, slot_pb2, slot_service_pb2
from xllm_service.app import Server

FREE, ACQUIRED = slot_pb2.SLOT_STATE_FREE, slot_pb2.SLOT_STATE_ACQUIRED
READY, DECODING = slot_pb2.SLOT_STATE_READY, slot_pb2.SLOT_STATE_DECODING
MODES = [DecodeMode.BATCHED, DecodeMode.PER_SLOT]


@pytest.fixture
async def served(random_model: Path, tmp_path: Path) -> AsyncIterator[tuple[Server, Slots]]:
    async with serving(random_model, tmp_path, decode_mode="auto", max_slots=4) as (server, client):
        yield server, Slots(client)


@pytest.fixture
async def endless(endless_model: Path, tmp_path: Path) -> AsyncIterator[tuple[Server, Slots]]:
    settings: dict[str, Any] = {"decode_mode": "auto", "max_slots": 4, "prefill_chunk": 8, "max_seq_len": 100_000}
    async with serving(endless_model, tmp_path, **settings) as (server, client):
        yield server, Slots(client)


# ---- the life of a slot ----


@pytest.mark.parametrize("mode", MODES)
async def test_a_slot_goes_through_its_life(served: tuple[Server, Slots], mode: DecodeMode) -> None:
    server, slots = served
    ref, slot = await slots.acquire(decode_mode=mode)
    assert (slot.state, slot.decode_mode, slot.num_tokens, slot.num_kv_blocks) == (ACQUIRED, mode, 0, 0)
    assert (slot.name, slot.epoch, slot.model, slot.owner) == (ref.name, ref.epoch, "random", "")
    assert len(ref.secret) == 16
    found = await slots.prefill(ref)
    assert kinds(found)[0] == "prefill_progress" and kinds(found)[-1] == "finished"
    done = found[-1].finished
    assert (done.slot.state, done.slot.num_tokens) == (READY, done.usage.num_prompt_tokens)
    num_prompt = done.slot.num_tokens
    found = await slots.any_decode(ref, mode, 5)
    assert kinds(found)[0] == "accepted" and kinds(found)[-2:] == ["output_finished", "finished"]
    assert found[-2].output_finished.reason == generation_pb2.FINISH_REASON_MAX_TOKENS
    assert found[-1].finished.usage.num_generated_tokens == 5
    accepted = found[0].accepted if mode is DecodeMode.PER_SLOT else found[0].accepted.entries[0]
    assert (accepted.decode_mode, accepted.slot.name, accepted.slot.epoch) == (mode, ref.name, ref.epoch)
    assert not accepted.slot.secret
    assert (accepted.num_prompt_tokens, accepted.num_cached_tokens) == (num_prompt, num_prompt - 1)
    slot = await slots.get(ref.name)
    assert (slot.state, slot.num_tokens) == (READY, num_prompt + 5)
    assert slot.expire_time.ToSeconds() > slot.acquire_time.ToSeconds()
    released = await slots.release(ref)
    assert released.name == ref.name
    await eventually(lambda: is_idle(server))
    slot = await slots.get(ref.name)
    assert (slot.state, slot.num_kv_blocks, slot.HasField("expire_time")) == (FREE, 0, False)


@pytest.mark.parametrize("mode", MODES)
async def test_decoding_in_pieces_says_what_one_generation_says(served: tuple[Server, Slots], mode: DecodeMode) -> None:
    _, slots = served
    whole = await slots.client.generate_once("hello", max_tokens=12, decode_mode=mode, ignore_eos=True)
    ref, _ = await slots.acquire(decode_mode=mode)
    await slots.prefill(ref)
    tokens: list[int] = []
    for count in (1, 4, 7):
        options: dict[str, Any] = {"output": {"token_ids": True}, "stop": {"ignore_eos": True}}
        call = slots.any_decode_call(ref, mode, max_tokens=count, **options)
        tokens += [token.id for message in await events(call) for token in message.delta.tokens]
    with_ids = await slots.client.generate_once(
        "hello", max_tokens=12, decode_mode=mode, ignore_eos=True, token_ids=True
    )
    assert tokens == [token.id for token in with_ids.outputs[0].tokens]
    assert with_ids.text == whole.text


async def test_further_prompts_are_appended(served: tuple[Server, Slots]) -> None:
    _, slots = served
    ref, _ = await slots.acquire()
    first = (await slots.prefill(ref, token_ids={"ids": [5, 6, 7]}))[-1].finished
    assert (first.slot.num_tokens, first.usage.num_prompt_tokens) == (3, 3)
    await slots.batch([ref], 2)
    second = (await slots.prefill(ref, token_ids={"ids": [8, 9]}))[-1].finished
    assert (second.slot.num_tokens, second.usage.num_prompt_tokens) == (7, 2)


async def test_a_batch_moves_in_lock_step_and_each_says_what_it_says_alone(served: tuple[Server, Slots]) -> None:
    _, slots = served
    prompts = ["hello", "the world", "on the"]
    alone = [await slots.client.generate_once(prompt, max_tokens=8, ignore_eos=True) for prompt in prompts]
    refs = []
    for prompt in prompts:
        ref, _ = await slots.acquire()
        await slots.prefill(ref, prompt)
        refs.append(ref)
    found = await slots.batch(refs, 8, stop={"ignore_eos": True})
    assert [text_of(found, index) for index in range(3)] == [one.text for one in alone]
    assert len(found[0].accepted.entries) == 3
    assert [entry.slot.name for entry in found[0].accepted.entries] == [ref.name for ref in refs]
    assert found[-1].finished.usage.num_generated_tokens == 24
    counts = [0, 0, 0]
    for message in found:
        if message.WhichOneof("event") == "delta":
            counts[message.delta.output_index] += message.delta.num_tokens
    assert counts == [8, 8, 8]


# ---- owners and epochs ----


CALLS = ["RenewSlot", "Prefill", "DecodeSlot", "DecodeBatch", "ReleaseSlot"]


async def use(slots: Slots, call: str, ref: Any) -> Any:
    """Make a call on a slot, whatever it is."""
    match call:
        case "RenewSlot":
            return await slots.renew(ref)
        case "Prefill":
            return await slots.prefill(ref)
        case "DecodeSlot":
            return await slots.decode(ref)
        case "DecodeBatch":
            return await slots.batch([ref])
        case _:
            return await slots.release(ref)


@pytest.mark.parametrize("call", CALLS)
async def test_a_foreign_slot_is_denied_and_stays_as_it_is(served: tuple[Server, Slots], call: str) -> None:
    _, slots = served
    ref, _ = await slots.acquire()
    await slots.prefill(ref)
    before = await slots.get(ref.name)
    for secret in (b"", b"x", ref.secret[:15], bytes(16), ref.secret + b"\0"):
        foreign = slot_pb2.SlotRef(name=ref.name, epoch=ref.epoch, secret=secret)
        refused = await failure(use(slots, call, foreign))
        assert (refused.code, refused.reason) == (grpc.StatusCode.PERMISSION_DENIED, "FOREIGN_SLOT")
        assert ref.secret.hex() not in str(refused)
    after = await slots.get(ref.name)
    assert (after.state, after.num_tokens, after.epoch) == (before.state, before.num_tokens, before.epoch)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("has_new_owner", [False, True])
async def test_a_stale_epoch_is_aborted(served: tuple[Server, Slots], call: str, has_new_owner: bool) -> None:
    server, slots = served
    ref, _ = await slots.acquire()
    await slots.prefill(ref)
    await slots.release(ref)
    await eventually(lambda: is_idle(server))
    if has_new_owner:
        newer, _ = await slots.acquire(slot_name=ref.name)
        assert newer.epoch > ref.epoch
    refused = await failure(use(slots, call, ref))
    assert (refused.code, refused.reason) == (grpc.StatusCode.ABORTED, "STALE_EPOCH")
    assert refused.metadata["slot"] == ref.name
    assert int(refused.metadata["epoch"]) == ref.epoch
    assert int(refused.metadata["current_epoch"]) == (newer.epoch if has_new_owner else ref.epoch)


@pytest.mark.parametrize("name", ["random/99", "other/0", "random", "random/-1", "x" * 5000, "random/00"])
async def test_an_unknown_slot_is_not_found(served: tuple[Server, Slots], name: str) -> None:
    _, slots = served
    for work in (slots.get(name), slots.renew(slot_pb2.SlotRef(name=name)), slots.acquire(slot_name=name)):
        refused = await failure(work)
        assert (refused.code, refused.reason) == (grpc.StatusCode.NOT_FOUND, "SLOT_NOT_FOUND")


async def test_a_generations_own_slot_belongs_to_nobody_else(endless: tuple[Server, Slots]) -> None:
    _, slots = endless
    generation = slots.client.generate("x", max_tokens=50_000)
    ref = (await anext(generation)).message.accepted.slot
    assert (await failure(slots.release(ref))).reason == "FOREIGN_SLOT"
    assert (await slots.get(ref.name)).state in (DECODING, slot_pb2.SLOT_STATE_PREFILLING)
    generation.close()


async def test_a_principal_owns_its_slots_by_its_name(random_model: Path, tmp_path: Path) -> None:
    tokens = ["first-long-enough-token", "second-long-enough-token"]
    file = tmp_path / "tokens"
    file.write_text("\n".join(tokens))
    file.chmod(0o600)
    async with serving(random_model, tmp_path, token_file=file) as (server, _):
        endpoint = str(server.endpoints[0])
        async with AsyncClient(endpoint, token=tokens[0]) as one, AsyncClient(endpoint, token=tokens[1]) as other:
            ref, slot = await Slots(one).acquire()
            assert not ref.secret and slot.owner
            await Slots(one).prefill(ref)
            assert (await failure(Slots(other).prefill(ref))).reason == "FOREIGN_SLOT"
            assert (await failure(Slots(other).batch([ref]))).reason == "FOREIGN_SLOT"
            assert (await Slots(other).get(ref.name)).state == READY, "what slots do is no secret"
            await Slots(one).release(ref)


# ---- seats and leases ----


async def test_no_free_slot_is_told_and_waiting_helps(served: tuple[Server, Slots]) -> None:
    server, slots = served
    held = [(await slots.acquire())[0] for _ in range(4)]
    refused = await failure(slots.acquire())
    assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_FREE_SLOT")
    assert refused.retry_delay_s is not None
    pinned = await failure(slots.acquire(slot_name=held[0].name))
    assert (pinned.reason, pinned.metadata["slot"]) == ("NO_FREE_SLOT", held[0].name)
    assert pinned.message.startswith(f"{held[0].name} is taken")
    assert (await failure(slots.acquire(max_wait={"nanos": 20_000_000}))).reason == "NO_FREE_SLOT"
    waiting = asyncio.create_task(slots.acquire(max_wait={"seconds": 20}))
    while server.gate.num_calls == 0:
        await asyncio.sleep(0.001)
    await slots.release(held[0])
    ref, _ = await waiting
    assert ref.name == held[0].name


async def test_a_caller_that_goes_while_it_waits_leaves_nothing(served: tuple[Server, Slots]) -> None:
    server, slots = served
    held = [(await slots.acquire())[0] for _ in range(4)]
    waiting = asyncio.create_task(slots.acquire(max_wait={"seconds": 20}))
    await eventually(lambda: server.gate.num_calls == 1)
    waiting.cancel()
    await eventually(lambda: server.gate.num_calls == 0)
    for ref in held:
        await slots.release(ref)
    await eventually(lambda: is_idle(server))
    await asyncio.sleep(0.05)
    assert is_idle(server)


@pytest.mark.parametrize("seconds", [0, -1, 3601])
async def test_a_lease_out_of_range_is_refused(served: tuple[Server, Slots], seconds: int) -> None:
    _, slots = served
    refused = await failure(slots.acquire(ttl={"seconds": seconds}))
    assert (refused.reason, refused.field_violations[0].field) == ("INVALID_FIELD", "ttl")
    ref, _ = await slots.acquire()
    assert (await failure(slots.renew(ref, seconds))).reason == "INVALID_FIELD"


@pytest.mark.parametrize("mode", MODES)
async def test_a_lease_that_ends_frees_the_slot_and_ends_its_call(
    endless: tuple[Server, Slots], mode: DecodeMode
) -> None:
    server, slots = endless
    ref, _ = await slots.acquire(decode_mode=mode, ttl={"seconds": 1})
    await slots.prefill(ref)
    call = slots.any_decode_call(ref, mode, max_tokens=90_000)
    await read(call, "accepted")
    lost = await failure(events_after(call))
    assert (lost.code, lost.reason) == (grpc.StatusCode.ABORTED, "LEASE_LOST")
    await eventually(lambda: is_idle(server))
    for call_name in CALLS:
        assert (await failure(use(slots, call_name, ref))).reason == "LEASE_LOST"


async def test_renewing_moves_the_end_of_the_lease(served: tuple[Server, Slots]) -> None:
    _, slots = served
    ref, slot = await slots.acquire(ttl={"seconds": 10})
    renewed = await slots.renew(ref, 100)
    assert 85 < renewed.expire_time.ToSeconds() - slot.expire_time.ToSeconds() < 95
    assert 55 < (await slots.renew(ref)).expire_time.ToSeconds() - renewed.acquire_time.ToSeconds() < 65


# ---- ends of streams ----


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["completion", "deadline", "cancel", "max_duration"])
async def test_however_a_decode_ends_the_slot_is_ready_and_its_lease_runs(
    endless: tuple[Server, Slots], mode: DecodeMode, way: str
) -> None:
    server, slots = endless
    ref, _ = await slots.acquire(decode_mode=mode)
    await slots.prefill(ref)
    if way == "completion":
        await slots.any_decode(ref, mode, 3)
    elif way == "max_duration":
        limits = {"max_duration": {"nanos": 200_000_000}}
        found = await events(slots.any_decode_call(ref, mode, limits=limits))
        assert found[-2].output_finished.reason == generation_pb2.FINISH_REASON_MAX_DURATION
    else:
        call = slots.any_decode_call(ref, mode, max_tokens=90_000, timeout=0.5 if way == "deadline" else 20)
        await read(call, "delta")
        if way == "cancel":
            call.cancel()
        else:
            assert (await failure(events_after(call))).code is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(lambda: len(server.served.generations) == 0)
    async with asyncio.timeout(10):
        while (slot := await slots.get(ref.name)).state != READY:
            await asyncio.sleep(0.002)
    assert slot.HasField("expire_time") and slot.num_tokens > 3
    assert (await slots.any_decode(ref, mode, 2))[-1].finished.usage.num_generated_tokens == 2
    await slots.release(ref)
    await eventually(lambda: is_idle(server))


async def test_a_cancelled_prefill_leaves_the_slot_as_it_was(endless: tuple[Server, Slots]) -> None:
    server, slots = endless
    ref, _ = await slots.acquire()
    for before in ((ACQUIRED, 0), (READY, 3)):
        call = slots.prefill_call(ref, token_ids={"ids": [5] * 30_000})
        await read(call, "prefill_progress")
        call.cancel()
        await eventually(lambda: len(server.served.generations) == 0)
        async with asyncio.timeout(10):
            while (slot := await slots.get(ref.name)).state != before[0]:
                await asyncio.sleep(0.002)
        assert slot.num_tokens == before[1]
        if before[0] == ACQUIRED:
            await slots.prefill(ref, token_ids={"ids": [5, 6, 7]})


@pytest.mark.parametrize("mode", MODES)
async def test_releasing_a_slot_ends_the_call_in_it(endless: tuple[Server, Slots], mode: DecodeMode) -> None:
    server, slots = endless
    ref, _ = await slots.acquire(decode_mode=mode)
    await slots.prefill(ref)
    call = slots.any_decode_call(ref, mode, max_tokens=90_000)
    await read(call, "delta")
    await slots.release(ref)
    assert (await failure(events_after(call))).reason == "LEASE_LOST"
    await eventually(lambda: is_idle(server))


async def test_one_slot_of_a_batch_that_is_released_ends_alone(endless: tuple[Server, Slots]) -> None:
    _, slots = endless
    refs = [(await slots.acquire())[0] for _ in range(2)]
    for ref in refs:
        await slots.prefill(ref)
    call = slots.batch_call(refs, 3000)
    await read(call, "delta")
    await slots.release(refs[0])
    first = await read(call, "output_finished")
    assert (first.output_index, first.reason) == (0, generation_pb2.FINISH_REASON_CANCELLED)
    second = await read(call, "output_finished")
    assert (second.output_index, second.reason) == (1, generation_pb2.FINISH_REASON_MAX_TOKENS)
    await read(call, "finished")


# ---- refusals that change nothing ----


async def test_a_state_that_does_not_allow_a_call_is_named(endless: tuple[Server, Slots]) -> None:
    _, slots = endless
    ref, _ = await slots.acquire()
    refused = await failure(slots.batch([ref]))
    assert (refused.code, refused.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "SLOT_STATE")
    assert refused.metadata == {"slot": ref.name, "state": "ACQUIRED", "call": "DecodeBatch"} | {
        key: value for key, value in refused.metadata.items() if key not in ("slot", "state", "call")
    }
    await slots.prefill(ref)
    call = slots.batch_call([ref], 50_000)
    await read(call, "delta")
    for work in (slots.batch([ref]), slots.prefill(ref)):
        busy = await failure(work)
        assert (busy.reason, busy.metadata["state"]) == ("SLOT_STATE", "DECODING")
    call.cancel()


async def test_a_batch_is_refused_as_a_whole(served: tuple[Server, Slots]) -> None:
    server, slots = served
    good, _ = await slots.acquire()
    await slots.prefill(good)
    empty, _ = await slots.acquire()
    per_slot, _ = await slots.acquire(decode_mode=DecodeMode.PER_SLOT)
    await slots.prefill(per_slot)
    foreign = slot_pb2.SlotRef(name=good.name, epoch=good.epoch)
    before = stats(server).num_generated_tokens
    for bad, reason in ((empty, "SLOT_STATE"), (per_slot, "DECODE_MODE_MISMATCH"), (foreign, "FOREIGN_SLOT")):
        assert (await failure(slots.batch([good, bad]))).reason == reason
    twice = await failure(slots.batch([good, good]))
    assert (twice.reason, twice.field_violations[0].field) == ("INVALID_FIELD", "entries[1].ref")
    assert (await failure(slots.batch([]))).field_violations[0].field == "entries"
    assert stats(server).num_generated_tokens == before
    assert (await slots.get(good.name)).state == READY


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"sampling": {"temperature": -1.0}}, "sampling.temperature"),
        ({"limits": {"max_tokens": 0}}, "limits.max_tokens"),
        ({"stop": {"strings": [""]}}, "stop.strings[0]"),
    ],
)
async def test_a_bad_option_is_named(served: tuple[Server, Slots], options: Any, field: str) -> None:
    _, slots = served
    ref, _ = await slots.acquire()
    await slots.prefill(ref)
    refused = await failure(slots.batch([ref], **options))
    assert refused.field_violations[0].field == f"entries[0].options.{field}"
    refused = await failure(slots.decode(ref, **options))
    assert refused.field_violations[0].field == f"options.{field}"


async def test_a_prompt_that_does_not_fit_is_refused(served: tuple[Server, Slots]) -> None:
    _, slots = served
    ref, _ = await slots.acquire()
    refused = await failure(slots.prefill(ref, token_ids={"ids": [5] * 2048}))
    assert (refused.reason, refused.field_violations[0].field) == ("PROMPT_TOO_LONG", "token_ids")
    assert (await failure(slots.prefill(ref, token_ids={"ids": [-1]}))).field_violations[0].field == "token_ids.ids[0]"
    assert (await slots.get(ref.name)).state == ACQUIRED


async def test_every_slot_is_listed(served: tuple[Server, Slots]) -> None:
    _, slots = served
    ref, _ = await slots.acquire()
    found = await slots.every()
    assert [slot.name for slot in found] == [f"random/{index}" for index in range(4)]
    assert {slot.name: slot.state for slot in found}[ref.name] == ACQUIRED
    assert [slot.name for slot in await slots.every("random")] == [slot.name for slot in found]
    assert (await failure(slots.every("other"))).reason == "MODEL_NOT_FOUND"


@pytest.mark.parametrize("mode", MODES)
async def test_a_decode_that_is_sent_again_replaces_the_first(endless: tuple[Server, Slots], mode: DecodeMode) -> None:
    server, slots = endless
    ref, _ = await slots.acquire(decode_mode=mode)
    await slots.prefill(ref)
    options = {"limits": {"max_tokens": 2000}}
    call: Any
    if mode is DecodeMode.PER_SLOT:
        call = slot_service_pb2.DecodeSlotRequest(ref=ref, options=options, request_id="same")
    else:
        entries = [{"ref": ref, "options": options}]
        call = slot_service_pb2.DecodeBatchRequest(entries=entries, request_id="same")
    method = slots.client.slots.DecodeSlot if mode is DecodeMode.PER_SLOT else slots.client.slots.DecodeBatch
    first: Any = method(call, timeout=20)
    await read(first, "delta")
    again = await events(method(call, timeout=20))
    assert again[-1].finished.usage.num_generated_tokens == 2000
    assert (await failure(events_after(first))).code is grpc.StatusCode.CANCELLED
    await slots.release(ref)
    await eventually(lambda: is_idle(server))


# ---- Generate in a slot ----


async def generate_in(slots: Slots, ref: Any, prompt: Any, **fields: Any) -> Any:
    spec = generation_service_pb2.GenerationSpec(slot=ref, **fields)
    if isinstance(prompt, str):
        spec.text = prompt
    else:
        spec.token_ids.ids.extend(prompt)
    request = generation_service_pb2.GenerateOnceRequest(spec=spec)
    return await slots.client._call(slots.client._generation.GenerateOnce, request)


@pytest.mark.parametrize("mode", MODES)
async def test_generate_runs_in_the_slot_it_is_given_and_leaves_it_owned(
    served: tuple[Server, Slots], mode: DecodeMode
) -> None:
    server, slots = served
    limits = {"max_tokens": 6}
    alone = await slots.client.generate_once("hello", max_tokens=6, decode_mode=mode)
    ref, _ = await slots.acquire(decode_mode=mode)
    first = await generate_in(slots, ref, "hello", limits=limits)
    assert first.outputs[0].text == alone.text
    assert (first.accepted.slot.name, first.accepted.slot.epoch, first.accepted.decode_mode) == (
        ref.name,
        ref.epoch,
        mode,
    )
    assert first.accepted.effective.limits.max_tokens == 6
    assert first.usage == alone.usage
    slot = await slots.get(ref.name)
    held = first.usage.num_prompt_tokens + first.usage.num_generated_tokens
    assert (slot.state, slot.num_tokens) == (READY, held)
    told = generation_service_pb2.EstimateGenerationRequest(spec={"slot": ref, "token_ids": {"ids": [5, 6]}})
    estimate = await slots.client._call(slots.client._generation.EstimateGeneration, told)
    assert (estimate.num_prompt_tokens, estimate.num_cached_tokens, estimate.queue_position) == (held + 2, held, 0)
    second = await generate_in(slots, ref, [5, 6], limits=limits, sampling={"temperature": 1.0})
    assert (second.accepted.num_prompt_tokens, second.accepted.num_cached_tokens >= held) == (held + 2, True)
    again_ref, _ = await slots.acquire(decode_mode=mode)
    await generate_in(slots, again_ref, "hello", limits=limits)
    sampling = {"temperature": 1.0, "seed": second.accepted.effective.sampling.seed}
    again = await generate_in(slots, again_ref, [5, 6], limits=limits, sampling=sampling)
    assert again.outputs[0].text == second.outputs[0].text, "the seed that was drawn is the one that is told"
    for owned in (ref, again_ref):
        await slots.release(owned)
    await eventually(lambda: is_idle(server))


async def test_a_slot_that_generate_may_not_use_is_refused(served: tuple[Server, Slots]) -> None:
    server, slots = served
    ref, _ = await slots.acquire()
    before = stats(server).num_prompt_tokens
    foreign = slot_pb2.SlotRef(name=ref.name, epoch=ref.epoch)
    assert (await failure(generate_in(slots, foreign, "x"))).reason == "FOREIGN_SLOT"
    stale = slot_pb2.SlotRef(name=ref.name, epoch=ref.epoch + 7, secret=ref.secret)
    assert (await failure(generate_in(slots, stale, "x"))).reason == "STALE_EPOCH"
    mismatch = await failure(generate_in(slots, ref, "x", decode_mode=DecodeMode.PER_SLOT))
    assert (mismatch.reason, mismatch.metadata["call"]) == ("DECODE_MODE_MISMATCH", "GenerateOnce")
    assert (mismatch.metadata["engine_mode"], mismatch.metadata["requested_mode"]) == ("AUTO", "PER_SLOT")
    bad = await failure(generate_in(slots, ref, "x", sampling={"temperature": -1.0}))
    assert bad.field_violations[0].field == "spec.sampling.temperature"
    long = await failure(generate_in(slots, ref, [5] * 2048))
    assert (long.reason, long.field_violations[0].field) == ("PROMPT_TOO_LONG", "spec.token_ids")
    assert (await slots.get(ref.name)).state == ACQUIRED and stats(server).num_prompt_tokens == before


async def test_releasing_the_slot_ends_the_generation_in_it(endless: tuple[Server, Slots]) -> None:
    server, slots = endless
    ref, _ = await slots.acquire()
    running = asyncio.create_task(generate_in(slots, ref, "x", limits={"max_tokens": 90_000}))
    async with asyncio.timeout(10):
        while (await slots.get(ref.name)).state != DECODING:
            await asyncio.sleep(0.002)
    await slots.release(ref)
    assert (await failure(running)).reason == "LEASE_LOST"
    await eventually(lambda: is_idle(server))


# ---- memory ----


async def test_a_weight_set_that_does_not_fit_is_refused_before_anything_is_loaded(
    random_model: Path, tmp_path: Path
) -> None:
    async with serving(random_model, tmp_path / "a", decode_mode="auto", kv_memory="4MiB") as (_, client):
        needed = (await client.get_model()).plan.total_bytes
    settings: dict[str, Any] = {"decode_mode": "auto", "kv_memory": "4MiB", "memory_limit": needed + 1000}
    async with serving(random_model, tmp_path, **settings) as (server, client):
        slots = Slots(client)
        await client.generate_once("hello", max_tokens=2)
        for work in (
            slots.acquire(decode_mode=DecodeMode.PER_SLOT),
            client.generate_once("hello", max_tokens=2, decode_mode=DecodeMode.PER_SLOT),
        ):
            refused = await failure(work)
            assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "MEMORY")
            assert int(refused.metadata["bytes_needed"]) > int(refused.metadata["bytes_free"])
            assert refused.metadata["remedy"]
        sets = (await client.get_model()).plan.weight_sets
        assert [(one.decode_mode, one.is_loaded) for one in sets] == [(1, True), (2, False)]
        assert (await client.generate_once("hello", max_tokens=2)).usage.num_generated_tokens == 2
        await eventually(lambda: is_idle(server))
