"""Structured output with the real engine: what stops is what was asked for, and nobody else notices."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import re
import subprocess
import threading
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest

from tests.e2e.serving import eventually, is_idle, serving
from tests.e2e.slot_calls import Slots, events, failure, text_of
from tests.tools.make_tiny_gguf import make_tiny_gguf
from tests.tools.schemas import heavy_schemas, hostile_schemas, random_schema
from xllm_client import AsyncClient, DecodeMode, InvalidArgumentError, XllmError
from xllm_client.v1 import generation_pb2, generation_service_pb2, slot_pb2, slot_service_pb2
from xllm_service.app import Server
from xllm_service.constraints import CompiledConstraint, Constraint

STOPPED = (generation_pb2.FINISH_REASON_EOS, generation_pb2.FINISH_REASON_CONSTRAINT_COMPLETE)
FEW, MANY = 16, 500


@pytest.mark.parametrize("num_schemas", [FEW, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
async def test_every_output_that_stops_is_valid_and_nearly_all_stop(
    demo_model: Path, tmp_path: Path, num_schemas: int
) -> None:
    num_stopped = 0
    async with serving(demo_model, tmp_path, kv_memory="256MiB") as (server, client):
        turns = asyncio.Semaphore(8)

        async def one(seed: int) -> bool:
            schema = random_schema(seed)
            ask = [{"role": "user", "content": f"Make up a record number {seed} and write it as JSON."}]
            sampling: dict[str, Any] = {"temperature": 0.8, "seed": seed} if seed % 2 else {}
            async with turns:
                reply = await client.chat_once(ask, json_schema=schema, max_tokens=512, timeout_s=600, **sampling)
            if reply.outputs[0].finished.reason not in STOPPED:
                return False
            jsonschema.validate(json.loads(reply.text), schema)
            return True

        num_stopped = sum(await asyncio.gather(*(one(seed) for seed in range(num_schemas))))
        await eventually(lambda: is_idle(server))
    assert num_stopped >= 0.95 * num_schemas


async def test_each_kind_through_every_call(random_model: Path, tmp_path: Path) -> None:
    async with serving(random_model, tmp_path, decode_mode="auto") as (server, client):
        for options, fits in (
            ({"regex": "[0-9]{3}-[a-z]{2,4}"}, lambda text: re.fullmatch("[0-9]{3}-[a-z]{2,4}", text)),
            ({"choice": ["red", "green é"]}, lambda text: text in ("red", "green é")),
            ({"grammar": 'start: "x" NUM\nNUM: /[0-9]{1,4}/'}, lambda text: re.fullmatch("x[0-9]{1,4}", text)),
            ({"json_schema": {"enum": [1.5, "a", None]}}, lambda text: json.loads(text) in (1.5, "a", None)),
        ):
            for mode in (DecodeMode.BATCHED, DecodeMode.PER_SLOT):
                replies = [
                    await client.generate_once(
                        "the", max_tokens=64, decode_mode=mode, temperature=1.5, seed=n, **options
                    )
                    for n in range(4)
                ]
                replies.append(await client.generate("the", max_tokens=64, decode_mode=mode, **options).result())
                for reply in replies:
                    assert reply.outputs[0].finished.reason in STOPPED, (options, reply.text)
                    assert fits(reply.text), (options, reply.text)
        await eventually(lambda: is_idle(server))


async def test_an_output_that_is_complete_ends_without_another_token(random_model: Path, tmp_path: Path) -> None:
    async with serving(random_model, tmp_path) as (server, client):
        reply = await client.generate_once("the", choice=["abc"], token_ids=True, stop=["cx"])
        (output,) = reply.outputs
        assert output.text == "abc", "also what a stop string had held back"
        assert output.finished.reason == generation_pb2.FINISH_REASON_CONSTRAINT_COMPLETE
        assert b"".join(token.piece for token in output.tokens) == b"abc"
        assert output.finished.num_tokens == len(output.tokens) == reply.usage.num_generated_tokens
        await eventually(lambda: is_idle(server))


async def test_slots_are_constrained_too_and_stay_ready(random_model: Path, tmp_path: Path) -> None:
    async with serving(random_model, tmp_path) as (server, client):
        async with await client.acquire_slot() as slot:
            for _ in range(2):
                reply = await client.generate_once("the", choice=["red", "blue"], slot=slot.ref)
                assert reply.text in ("red", "blue")
        await eventually(lambda: is_idle(server))


def thinking_model(folder: Path, said: str, then: int) -> Path:
    """A model that says a text, in which no byte occurs twice, inside a reasoning section, and a token after it."""
    chain = [3 + ord("\n"), *(3 + byte for byte in said.encode()), then]
    path = folder / "thinking.gguf"
    template = "{{ messages[0].content }}{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"
    script = dict(itertools.pairwise(chain))
    make_tiny_gguf(
        path, tied=False, dtype="f32", hidden_size=256, next_token=script, next_default=2, chat_template=template
    )
    return path


ASK = [{"role": "user", "content": "?"}]


async def test_thinking_is_free_and_the_answer_is_not(tmp_path: Path) -> None:
    path = thinking_model(tmp_path, "so. 1</think>A", 3 + ord("B"))
    async with serving(path, tmp_path) as (_, client):
        reply = await client.chat_once(ASK, regex="A[0-9]")
        (output,) = reply.outputs
        assert output.reasoning_text == "so. 1"
        assert re.fullmatch("A[0-9]", output.text)
        plain = await client.chat_once(ASK)
        assert plain.outputs[0].text.startswith("AB")


async def test_an_end_inside_the_thinking_is_none_as_the_answer_would_be_missing(tmp_path: Path) -> None:
    path = thinking_model(tmp_path, "so. 1", 2)
    async with serving(path, tmp_path) as (_, client):
        assert (await client.chat_once(ASK)).outputs[0].finished.reason == generation_pb2.FINISH_REASON_EOS
        reply = await client.chat_once(ASK, regex="A[0-9]", max_tokens=12)
        assert reply.outputs[0].finished.reason == generation_pb2.FINISH_REASON_MAX_TOKENS
        assert reply.outputs[0].reasoning_text.startswith("so. 1") and reply.text == ""


async def test_neighbours_have_the_bytes_that_they_have_alone(random_model: Path, tmp_path: Path) -> None:
    schema = random_schema(3)

    async def plain(client: AsyncClient, n: int) -> str:
        return (await client.generate_once(f"the {n}", max_tokens=48, temperature=0.7, seed=n)).text

    async def shaped(client: AsyncClient, n: int) -> str:
        return (await client.generate_once(f"an {n}", max_tokens=200, temperature=0.7, seed=n, json_schema=schema)).text

    async with serving(random_model, tmp_path) as (server, client):
        alone = [await plain(client, n) for n in range(4)], [await shaped(client, n) for n in range(4)]
        calls = [*(plain(client, n) for n in range(4)), *(shaped(client, n) for n in range(4))]
        together = await asyncio.gather(*calls)
        assert (together[:4], together[4:]) == alone
        await eventually(lambda: is_idle(server))


async def test_what_cannot_be_held_to_is_refused_before_anything_runs(random_model: Path, tmp_path: Path) -> None:
    async with serving(random_model, tmp_path) as (server, client):
        beside = client.generate("the", max_tokens=300, seed=1, temperature=1.0)
        first = await anext(beside)
        num_steps_held = []
        for name, text in hostile_schemas().items():
            with pytest.raises(InvalidArgumentError) as caught:
                await client.generate_once("x", json_schema=text)
            assert caught.value.reason == "INVALID_CONSTRAINT", name
            num_steps_held.append(server.served.get("").engine.stats().num_running)
        assert max(num_steps_held) <= 1, "only the stream beside them ran"
        with pytest.raises(InvalidArgumentError) as caught:
            await client.estimate("x", regex="(a")
        assert caught.value.reason == "INVALID_CONSTRAINT"
        assert first.kind == "accepted" and (await beside.result()).usage.num_generated_tokens > 0
        alone = await client.generate_once("the", max_tokens=300, seed=1, temperature=1.0)
        assert (await beside.result()).text == alone.text
        await eventually(lambda: is_idle(server))


@pytest.mark.parametrize("name", heavy_schemas())
async def test_what_costs_much_holds_nobody_up(random_model: Path, tmp_path: Path, name: str) -> None:
    async with serving(random_model, tmp_path) as (server, client):

        async def heavy() -> None:
            try:
                await client.generate_once("x", json_schema=heavy_schemas()[name], max_tokens=24)
            except InvalidArgumentError as error:
                assert error.reason == "INVALID_CONSTRAINT"

        alone = (await client.generate_once("the", max_tokens=64)).text
        task = asyncio.create_task(heavy())
        assert (await client.generate_once("the", max_tokens=64)).text == alone
        await task
        await eventually(lambda: is_idle(server))


async def test_a_cancel_while_a_mask_is_waited_for_gives_everything_back(random_model: Path, tmp_path: Path) -> None:
    async with serving(random_model, tmp_path) as (server, client):
        for n in range(20):
            call = client.generate("the", max_tokens=200, json_object=True, temperature=1.0, seed=n)
            async for event in call:
                if event.kind == "delta":
                    break
            call.close()
        await eventually(lambda: is_idle(server))
        engine = server.served.get("").engine
        await eventually(lambda: not engine._constrained)


async def test_without_a_process_to_compile_it_a_constraint_may_be_tried_again(
    random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_processes(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    async with serving(random_model, tmp_path) as (server, client):
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", no_processes)
            with pytest.raises(XllmError, match="retry later") as caught:
                await client.generate_once("the", regex="ab", timeout_s=60)
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAVAILABLE, "COMPILER_UNAVAILABLE")
        assert caught.value.retry_delay_s
        assert (await client.generate_once("the", regex="ab")).text == "ab"
        await eventually(lambda: is_idle(server))


async def test_min_tokens_yields_to_an_output_that_nothing_may_follow(random_model: Path, tmp_path: Path) -> None:
    async with serving(random_model, tmp_path) as (_, client):
        reply = await client.generate_once("the", regex="a", min_tokens=5, max_tokens=8)
        assert (reply.text, reply.usage.num_generated_tokens) == ("a", 1)
        assert reply.outputs[0].finished.reason in STOPPED
        reply = await client.generate_once("the", regex="a(bcdefghij)?", min_tokens=2, max_tokens=20)
        assert reply.text == "abcdefghij"  # where something may follow, the end has to wait


async def test_each_of_several_outputs_keeps_to_it_by_itself(random_model: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"json_schema": random_schema(7), "temperature": 1.0, "max_tokens": 200}
    async with serving(random_model, tmp_path) as (server, client):
        reply = await client.generate_once("the", seed=3, num_outputs=4, **options)
        alone = [await client.generate_once("the", seed=3 + n, **options) for n in range(4)]
        assert [output.text for output in reply.outputs] == [one.text for one in alone]
        assert len({output.text for output in reply.outputs}) > 1
        for output in reply.outputs:
            assert output.finished.reason in STOPPED
            jsonschema.validate(json.loads(output.text), options["json_schema"])
        await eventually(lambda: is_idle(server))


async def test_many_rows_share_the_workers(random_model: Path, tmp_path: Path) -> None:
    async with serving(random_model, tmp_path, max_slots=40) as (server, client):
        words = [f"w{n}{'x' * (n % 5)}y" for n in range(40)]
        calls = [client.generate_once("the", choice=[word], max_tokens=16) for word in words]
        assert [reply.text for reply in await asyncio.gather(*calls)] == words
        await eventually(lambda: is_idle(server))


async def test_decodes_of_slots_are_constrained_and_go_on_from_there(random_model: Path, tmp_path: Path) -> None:
    async with serving(random_model, tmp_path, decode_mode="auto") as (server, client):
        slots = [await client.acquire_slot(decode_mode=DecodeMode.BATCHED) for _ in range(2)]
        for slot in slots:
            await slot.prefill("the")
        for words in (["red", "blue"], ["x1", "x22"]):
            outputs = (await client.decode_batch(slots, choice=words, temperature=1.0, seed=4).result()).outputs
            assert all(output.text in words for output in outputs)
            assert all(output.finished.reason in STOPPED for output in outputs)
        with pytest.raises(InvalidArgumentError) as caught:
            await client.decode_batch(slots, regex="(a").result()
        assert caught.value.reason == "INVALID_CONSTRAINT"
        assert caught.value.field_violations[0].field == "entries[0].options.constraint.regex"
        lone = await client.acquire_slot(decode_mode=DecodeMode.PER_SLOT)
        await lone.prefill("the")
        reply = await lone.decode(regex="[0-9]{2}", max_tokens=8).result()
        assert re.fullmatch("[0-9]{2}", reply.text)
        for slot in (*slots, lone):
            await slot.release()
        await eventually(lambda: is_idle(server))


# ---- what is found out before anything is compiled, and what ends it meanwhile ----


class HeldCompiler:
    """Stands in the place of a server's compiler: notes what comes, and waits until a test lets it go on."""

    def __init__(self, server: Server) -> None:
        self.begun: list[str] = []
        self.go_on = threading.Event()
        compilations = server.served.get("").engine.model._compilations
        self._compile_one = compilations._compile_one
        compilations._compile_one = self._compile

    def _compile(self, constraint: Constraint) -> CompiledConstraint:
        self.begun.append(constraint.text)
        assert self.go_on.wait(60)
        return self._compile_one(constraint)


BATCHED, PER_SLOT = DecodeMode.BATCHED, DecodeMode.PER_SLOT
DIGITS: Any = {"regex": "[0-9]{3}"}


async def test_what_the_slot_or_the_engine_forbids_is_told_before_anything_is_compiled(
    random_model: Path, tmp_path: Path
) -> None:
    async with serving(random_model, tmp_path, decode_mode="auto", max_slots=4) as (server, client):
        compiler = HeldCompiler(server)
        compiler.go_on.set()
        slots = Slots(client)
        batched, _ = await slots.acquire(decode_mode=DecodeMode.BATCHED)
        per_slot, _ = await slots.acquire(decode_mode=DecodeMode.PER_SLOT)
        works: dict[DecodeMode, Any] = {
            BATCHED: lambda ref, **options: slots.batch([ref], constraint=DIGITS, **options),
            PER_SLOT: lambda ref, **options: slots.decode(ref, constraint=DIGITS, **options),
        }
        for ref, mode, other in ((batched, BATCHED, PER_SLOT), (per_slot, PER_SLOT, BATCHED)):
            empty = await failure(works[mode](ref))
            assert (empty.code, empty.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "SLOT_STATE")
            assert (empty.metadata["slot"], empty.metadata["state"]) == (ref.name, "ACQUIRED")
            await slots.prefill(ref)
            wrong = await failure(works[other](ref))
            assert wrong.reason == "DECODE_MODE_MISMATCH" and wrong.metadata["slot_mode"] == mode.name
            plain = await failure(slots.any_decode(ref, other))
            assert (plain.code, plain.reason, plain.metadata) == (wrong.code, wrong.reason, wrong.metadata)
            invalid = await failure(works[other](ref, sampling={"temperature": -1.0}))
            assert invalid.reason == "INVALID_FIELD", "what the request says comes before what the slot is"
        asked: Any = {"limits": {"max_tokens": 3}, "constraint": DIGITS}
        spec: Any = {"text": "x", "slot": per_slot, "decode_mode": int(DecodeMode.BATCHED), **asked}
        request = generation_service_pb2.GenerateOnceRequest(spec=spec)
        refused = await failure(client._call(client._generation.GenerateOnce, request))
        assert refused.reason == "DECODE_MODE_MISMATCH"
        await slots.release(batched)
        assert (await failure(slots.batch([batched], constraint=DIGITS))).reason == "STALE_EPOCH"
        assert compiler.begun == []
        await slots.decode(per_slot, constraint=DIGITS)
        assert compiler.begun == [DIGITS["regex"]]
        await slots.release(per_slot)


async def test_an_engine_of_another_mode_refuses_before_anything_is_compiled(
    random_model: Path, tmp_path: Path
) -> None:
    async with serving(random_model, tmp_path) as (server, client):
        compiler = HeldCompiler(server)
        with pytest.raises(XllmError) as caught:
            await client.generate_once("the", regex="ab", decode_mode=DecodeMode.PER_SLOT, timeout_s=20)
        assert caught.value.reason == "DECODE_MODE_MISMATCH" and compiler.begun == []
        compiler.go_on.set()


@pytest.mark.parametrize("call_name", ["decode_slot", "decode_batch", "generate"])
@pytest.mark.parametrize("way", ["deadline", "cancel", "disconnect"])
async def test_a_call_whose_constraint_is_being_compiled_can_be_ended(
    random_model: Path, tmp_path: Path, call_name: str, way: str
) -> None:
    async with serving(random_model, tmp_path, decode_mode="auto") as (server, client):
        compiler = HeldCompiler(server)
        slots = Slots(client)
        mode = DecodeMode.PER_SLOT if call_name == "decode_slot" else DecodeMode.BATCHED
        ref, _ = await slots.acquire(decode_mode=mode)
        await slots.prefill(ref)
        timeout = 0.5 if way == "deadline" else 60
        options: Any = {"constraint": DIGITS}
        if call_name == "decode_slot":
            call: Any = client.slots.DecodeSlot(
                slot_service_pb2.DecodeSlotRequest(ref=ref, options=options, request_id="r"), timeout=timeout
            )
        elif call_name == "decode_batch":
            entries: Any = [{"ref": ref, "options": options}]
            call = client.slots.DecodeBatch(
                slot_service_pb2.DecodeBatchRequest(entries=entries, request_id="r"), timeout=timeout
            )
        else:
            spec: Any = {"text": "x", "request_id": "r", **options}
            call = client._generation.Generate(generation_service_pb2.GenerateRequest(spec=spec), timeout=timeout)
        reading = asyncio.ensure_future(events(call))
        await eventually(lambda: compiler.begun)
        if way == "cancel":
            await client.cancel("r")
        elif way == "disconnect":
            call.cancel()
        with pytest.raises((XllmError, asyncio.CancelledError)):
            await reading
        await eventually(lambda: len(server.served.generations) == 0)
        receipt = await client.get_generation("r")
        states = {"deadline": generation_service_pb2.GENERATION_STATE_TIMED_OUT}
        assert receipt.state == states.get(way, generation_service_pb2.GENERATION_STATE_CANCELLED)
        assert (await slots.get(ref.name)).state == slot_pb2.SLOT_STATE_READY
        compiler.go_on.set()
        assert len(text_of(await slots.any_decode(ref, mode))) > 0
        await slots.release(ref)
