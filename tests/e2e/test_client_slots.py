"""The Python clients' own slots, sync and asyncio, against the real engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.serving import eventually, is_idle, server_process, serving
from xllm_client import AbortedError, Client, DecodeMode, PermissionDeniedError, ResourceExhaustedError, Slot
from xllm_client.v1 import slot_pb2

MODES = [DecodeMode.BATCHED, DecodeMode.PER_SLOT]


@pytest.mark.parametrize("mode", MODES)
async def test_an_async_slot_is_filled_decoded_and_released(
    random_model: Path, tmp_path: Path, mode: DecodeMode
) -> None:
    async with serving(random_model, tmp_path, decode_mode="auto", max_slots=2) as (server, client):
        alone = await client.generate_once("hello", max_tokens=9, decode_mode=mode, ignore_eos=True)
        async with await client.acquire_slot(decode_mode=mode, lease_s=30) as slot:
            assert slot.decode_mode is mode
            finished = await slot.prefill("hello")
            assert finished.usage.num_prompt_tokens == alone.usage.num_prompt_tokens
            assert slot.info.state == slot_pb2.SLOT_STATE_READY
            texts = []
            for count in (4, 5):
                result = await slot.decode(max_tokens=count, ignore_eos=True).result()
                assert DecodeMode(result.accepted.decode_mode) is mode and result.finish_reason == "MAX_TOKENS"
                texts.append(result.text)
            assert "".join(texts).encode("utf-8", "ignore")[:4] == alone.text.encode("utf-8", "ignore")[:4]
            await slot.renew(100)
            assert (await slot.refresh()).num_tokens == finished.slot.num_tokens + 9
            assert [one.name for one in await client.list_slots()] == ["random/0", "random/1"]
            with pytest.raises(ResourceExhaustedError):
                for _ in range(2):
                    await client.acquire_slot()
        await eventually(lambda: server.served.roster.stats()["random"].slots_used == 1)
        with pytest.raises(AbortedError) as caught:
            await slot.renew()
        assert caught.value.reason == "STALE_EPOCH"


async def test_closing_a_decode_leaves_the_slot_ready(endless_model: Path, tmp_path: Path) -> None:
    async with serving(endless_model, tmp_path, max_slots=2) as (server, client):
        slots = [await client.acquire_slot() for _ in range(2)]
        for slot in slots:
            await slot.prefill("x")
        both = client.decode_batch(slots, max_tokens=100_000)
        seen: set[int] = set()
        async for event in both:
            if event.kind == "delta":
                seen.add(event.output_index)
            if seen == {0, 1}:
                break
        both.close()
        await eventually(lambda: len(server.served.generations) == 0)
        while (await slots[0].refresh()).state != slot_pb2.SLOT_STATE_READY:
            pass
        result = await client.decode_batch(slots[:1], max_tokens=3).result()
        assert result.text == "CCC"
        for slot in slots:
            await slot.release()
        await eventually(lambda: is_idle(server))


def test_a_slot_for_ordinary_code(endless_model: Path, tmp_path: Path) -> None:
    with server_process(endless_model, tmp_path, "--max-slots", "2") as (_, endpoint), Client(endpoint) as client:
        with client.acquire_slot() as slot, client.acquire_slot() as other:
            for one in (slot, other):
                one.prefill([5, 6, 7])
            assert slot.decode(max_tokens=4).result().text == "CCCC"
            outputs = client.decode_batch([slot, other], max_tokens=2).result().outputs
            assert [output.text for output in outputs] == ["CC", "CC"]
            slot.renew(5)
            foreign = Slot(client, slot_pb2.SlotRef(name=slot.ref.name, epoch=slot.ref.epoch), slot.info)
            with pytest.raises(PermissionDeniedError):
                foreign.prefill("x")
            assert [one.num_tokens for one in client.list_slots()] == [9, 5]
        assert client.generate_once("x", max_tokens=2).text == "CC"
