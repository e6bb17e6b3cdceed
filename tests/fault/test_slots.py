"""Hostile calls on slots and engines: each gets its stated answer, and everything else goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.e2e.serving import eventually, is_idle, serving
from tests.e2e.slot_calls import Slots, failure
from tests.fault.invariants import unharmed
from xllm_client import AsyncClient
from xllm_client.v1 import admin_service_pb2, slot_pb2
from xllm_service.app import Server

NAN, INF = float("nan"), float("inf")


@pytest.fixture
async def served(random_model: Path, tmp_path: Path) -> AsyncIterator[tuple[Server, AsyncClient]]:
    folder = tmp_path / "models"
    folder.mkdir()
    for name, data in (("empty.gguf", b""), ("magic.gguf", b"GGUF"), ("huge.gguf", b"GGUF" + b"\xff" * 60)):
        (folder / name).write_bytes(data)
    (folder / "cut.gguf").write_bytes(random_model.read_bytes()[:5000])
    async with serving(random_model, tmp_path, max_slots=4, model_dir=folder) as (server, client):
        yield server, client


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"sampling": {"temperature": NAN}}, "sampling.temperature"),
        ({"sampling": {"top_p": -1.0}}, "sampling.top_p"),
        ({"sampling": {"top_k": -5}}, "sampling.top_k"),
        ({"sampling": {"repetition_penalty": 0.0}}, "sampling.repetition_penalty"),
        ({"sampling": {"logit_bias": {2**31 - 1: 1.0}}}, f"sampling.logit_bias[{2**31 - 1}]"),
        ({"limits": {"max_tokens": 0}}, "limits.max_tokens"),
        ({"limits": {"max_tokens": 2**31}}, "limits.max_tokens"),
        ({"limits": {"max_duration": {"nanos": -1}}}, "limits.max_duration"),
        ({"stop": {"strings": ["x"] * 17}}, "stop.strings"),
        ({"stop": {"token_ids": [-1]}}, "stop.token_ids[0]"),
        ({"output": {"top_logprobs": 1000}}, "output.top_logprobs"),
    ],
)
async def test_a_hostile_option_of_a_decode_is_named(
    served: tuple[Server, AsyncClient], options: dict[str, Any], field: str
) -> None:
    server, client = served
    slots = Slots(client)
    async with unharmed(server, client):
        ref, _ = await slots.acquire()
        await slots.prefill(ref)
        for work, path in (
            (slots.batch([ref], **options), "entries[0].options."),
            (slots.decode(ref, **options), "options."),
        ):
            refused = await failure(work)
            assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
            assert refused.field_violations[0].field == path + field
        await slots.release(ref)


@pytest.mark.parametrize("ids", [[-1], [2**31], [2**63 - 1], [5] * 5000, []])
async def test_hostile_token_ids_of_a_prefill_are_refused(served: tuple[Server, AsyncClient], ids: list[int]) -> None:
    server, client = served
    slots = Slots(client)
    async with unharmed(server, client):
        ref, _ = await slots.acquire()
        refused = await failure(slots.prefill(ref, token_ids={"ids": ids}))
        assert refused.code is grpc.StatusCode.INVALID_ARGUMENT and refused.field_violations
        assert (await slots.get(ref.name)).state == slot_pb2.SLOT_STATE_ACQUIRED
        await slots.release(ref)


async def test_a_thousand_guesses_at_a_secret_open_nothing(served: tuple[Server, AsyncClient]) -> None:
    server, client = served
    slots = Slots(client)
    async with unharmed(server, client):
        ref, _ = await slots.acquire()
        guesses = [slot_pb2.SlotRef(name=ref.name, epoch=ref.epoch, secret=bytes([n % 256] * 16)) for n in range(1000)]
        refusals = await asyncio.gather(*(failure(slots.release(guess)) for guess in guesses))
        assert {refusal.reason for refusal in refusals} == {"FOREIGN_SLOT"}
        assert (await slots.get(ref.name)).epoch == ref.epoch
        await slots.release(ref)


async def test_an_enormous_batch_is_refused_at_once(served: tuple[Server, AsyncClient]) -> None:
    server, client = served
    slots = Slots(client)
    async with unharmed(server, client):
        ref, _ = await slots.acquire()
        await slots.prefill(ref)
        assert (await failure(slots.batch([ref] * 20_000))).reason == "INVALID_FIELD"
        await slots.release(ref)


@pytest.mark.parametrize(
    ("source", "reasons"),
    [
        ("empty.gguf", {"TRUNCATED_MODEL"}),
        ("magic.gguf", {"TRUNCATED_MODEL"}),
        ("huge.gguf", {"INVALID_MODEL", "TRUNCATED_MODEL", "UNSUPPORTED_MODEL"}),
        ("cut.gguf", {"TRUNCATED_MODEL"}),
        ("../s/x.sock", {"MODEL_NOT_FOUND"}),
        ("/dev/zero", {"MODEL_NOT_FOUND"}),
    ],
)
async def test_a_hostile_model_file_is_refused_beside_running_streams(
    served: tuple[Server, AsyncClient], tmp_path: Path, source: str, reasons: set[str]
) -> None:
    server, client = served
    async with unharmed(server, client):
        call = admin_service_pb2.CreateEngineRequest(name="b", source=source)
        refused = await failure(client._call(client._admin.CreateEngine, call))
        assert refused.reason in reasons
        assert str(tmp_path) not in str(refused) + str(refused.metadata)
    await eventually(lambda: is_idle(server))
