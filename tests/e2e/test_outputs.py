"""Several outputs of one request: each has the bytes of a request of its own, and the prompt is computed once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import eventually, is_idle, serving, stats
from xllm_client import AsyncClient, InvalidArgumentError
from xllm_client.v1 import generation_pb2

PROMPT = [3 + (7 * i + i * i % 11) % 200 for i in range(100)]


def ids_of(output: Any) -> list[int]:
    return [token.id for token in output.tokens]


async def test_each_output_has_the_bytes_of_its_own_seed(random_model: Path, tmp_path: Path) -> None:
    options: Any = {"max_tokens": 24, "temperature": 1.0, "token_ids": True, "ignore_eos": True}
    async with serving(random_model, tmp_path, max_slots=3, block_size=16) as (server, client):
        before = stats(server)
        result = await client.generate_once(PROMPT, num_outputs=5, seed=40, cache_bypass=True, **options)
        after = stats(server)
        assert [output.output_index for output in result.outputs] == [0, 1, 2, 3, 4]
        assert result.accepted.effective.num_outputs == 5
        alone = [await client.generate_once(PROMPT, seed=40 + i, **options) for i in range(5)]
        assert [ids_of(output) for output in result.outputs] == [ids_of(one.outputs[0]) for one in alone]
        assert [output.text for output in result.outputs] == [one.text for one in alone]
        assert len({output.text for output in result.outputs}) > 1
        usage = result.usage
        assert (usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_generated_tokens) == (100, 0, 120)
        # Of the first three the prompt is computed once; the last two find nobody to share with and bypass the cache.
        computed = (after.num_prompt_tokens - before.num_prompt_tokens) - (
            after.num_cached_tokens - before.num_cached_tokens
        )
        assert computed <= 100 + 2 + 2 * 100
        await eventually(lambda: is_idle(server))


async def test_a_stream_tells_which_output_each_event_is_of(random_model: Path, tmp_path: Path) -> None:
    async with serving(random_model, tmp_path) as (_, client):
        events = [
            event.message
            async for event in client.generate(PROMPT, num_outputs=3, max_tokens=8, temperature=1.0, ignore_eos=True)
        ]
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds[0] == "accepted" and kinds.count("accepted") == 1
        assert kinds[-1] == "finished" and kinds.count("finished") == 1
        ends = [event.output_finished for event in events if event.HasField("output_finished")]
        assert sorted(end.output_index for end in ends) == [0, 1, 2]
        assert all(end.num_tokens == 8 for end in ends)
        for index in range(3):
            deltas = [event.delta for event in events if event.HasField("delta") and event.delta.output_index == index]
            assert sum(delta.num_tokens for delta in deltas) == 8


async def test_a_stop_in_one_answer_leaves_the_others_running(random_model: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hello"}]
    options: Any = {"num_outputs": 3, "seed": 7, "temperature": 1.0, "max_tokens": 40, "ignore_eos": True}
    async with serving(random_model, tmp_path) as (server, client):
        texts = [output.text for output in (await client.chat_once(chat, **options)).outputs]
        # A letter that one of them alone says.
        stopped, stop = next(
            (index, letter)
            for index, text in enumerate(texts)
            for letter in text
            if letter.isalpha() and sum(letter in other for other in texts) == 1
        )
        result = await client.chat_once(chat, stop=[stop], **options)
        for index, output in enumerate(result.outputs):
            assert output.text == texts[index].partition(stop)[0]
            assert (output.finished.num_tokens < 40) == (index == stopped)
            reason = "STOP_STRING" if index == stopped else "MAX_TOKENS"
            assert output.finished.reason == generation_pb2.FinishReason.Value(f"FINISH_REASON_{reason}")
        await eventually(lambda: is_idle(server))


async def test_cancelling_the_call_frees_every_output(endless_model: Path, tmp_path: Path) -> None:
    async with serving(endless_model, tmp_path, max_slots=2) as (server, client):
        generation = client.generate("x", num_outputs=4, max_tokens=100_000)
        await anext(generation)
        await eventually(lambda: stats(server).slots_used == 2)
        generation.close()
        await eventually(lambda: is_idle(server))


@pytest.mark.parametrize("count", [0, -1, 129, 2**31 - 1])
async def test_a_number_of_outputs_out_of_range_is_refused(random_model: Path, tmp_path: Path, count: int) -> None:
    async with serving(random_model, tmp_path) as (_, client):
        with pytest.raises(InvalidArgumentError) as caught:
            await client.generate_once("x", num_outputs=count)
        assert [violation.field for violation in caught.value.field_violations] == ["spec.num_outputs"]


async def test_more_outputs_than_the_queue_ever_holds_are_no_full_queue(random_model: Path, tmp_path: Path) -> None:
    async with serving(random_model, tmp_path, max_slots=2, max_queue=1) as (_, client):
        assert len((await client.generate_once("x", num_outputs=3, max_tokens=2)).outputs) == 3
        with pytest.raises(InvalidArgumentError, match=r"at most 3, .*max_slots \+ max_queue, found 4") as caught:
            await client.generate_once("x", num_outputs=4)
        assert [violation.field for violation in caught.value.field_violations] == ["spec.num_outputs"]
        assert caught.value.retry_delay_s is None


async def test_a_slot_has_one_output(random_model: Path, tmp_path: Path) -> None:
    async with serving(random_model, tmp_path) as (_, client):
        assert isinstance(client, AsyncClient)
        async with await client.acquire_slot() as slot:
            with pytest.raises(InvalidArgumentError, match="fork"):
                await client.generate_once("x", num_outputs=2, slot=slot.ref)
