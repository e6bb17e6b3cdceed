"""What a client sees of a served model: the same bytes every way it asks, whole characters, exact counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import eventually, is_idle, serving
from xllm_client import AsyncClient
from xllm_client.v1 import generation_pb2
from xllm_service.config import load_config
from xllm_service.engine import FinishedEvent, TokenEvent, open_engine, open_model

Speaking = Callable[[str], Path]


async def test_the_demo_model_knows_the_capital_of_france(demo_model: Path, tmp_path: Path) -> None:
    async with serving(demo_model, tmp_path) as (server, client):
        deltas = [
            event.message.delta
            async for event in client.generate("The capital of France is", max_tokens=8)
            if event.kind == "delta"
        ]
        assert "".join(delta.text for delta in deltas).startswith(" Paris")
        # One token each where the reader keeps up; a machine that is busy elsewhere may merge some, and none is lost.
        assert sum(delta.num_tokens for delta in deltas) == 8
        assert len(deltas) > 1
        answer = await client.chat_once([{"role": "user", "content": "What is 2 + 2?"}], max_tokens=24)
        assert "4" in answer.text
        await eventually(lambda: is_idle(server))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.95, "seed": 7, "repetition_penalty": 1.1}])
async def test_a_request_has_the_same_bytes_alone_in_company_and_in_process(
    random_model: Path, tmp_path: Path, sampling: dict[str, Any]
) -> None:
    prompt = "the hello world and the other"
    async with serving(random_model, tmp_path) as (server, client):
        alone = await client.generate(prompt, max_tokens=48, token_ids=True, **sampling).result()
        others = [client.generate(f"{'in the on ' * n}", max_tokens=64, temperature=1.0, seed=n) for n in range(1, 8)]
        company = await client.generate_once(prompt, max_tokens=48, token_ids=True, **sampling)
        await asyncio.gather(*(other.result() for other in others))
        await eventually(lambda: is_idle(server))
    with open_model(random_model) as model, open_engine(model, load_config(random_model)) as engine:
        events = list(engine.stream(model.encode(prompt), max_tokens=48, **sampling))
    ids = [token.id for token in alone.outputs[0].tokens]
    assert ids == [token.id for token in company.outputs[0].tokens]
    assert ids == [event.token_id for event in events if isinstance(event, TokenEvent)]
    assert alone.text == company.text == "".join(e.text for e in events if isinstance(e, TokenEvent | FinishedEvent))


async def test_a_seed_that_was_drawn_is_echoed_and_repeats(random_model: Path, tmp_path: Path) -> None:
    async with serving(random_model, tmp_path) as (_, client):
        first = await client.generate_once("the", max_tokens=24, temperature=1.0)
        seed = first.accepted.effective.sampling.seed
        again = await client.generate_once("the", max_tokens=24, temperature=1.0, seed=seed)
        other = await client.generate_once("the", max_tokens=24, temperature=1.0)
    assert again.text == first.text
    assert other.accepted.effective.sampling.seed != seed


async def test_an_emoji_over_four_tokens_is_sent_whole(speaking_model: Speaking, tmp_path: Path) -> None:
    async with serving(speaking_model("a\N{OPTICAL DISC}z"), tmp_path) as (_, client):
        deltas = [e.message.delta async for e in client.generate(">", token_ids=True) if e.kind == "delta"]
        assert "".join(d.text for d in deltas) == "a\N{OPTICAL DISC}z"
        assert b"".join(t.piece for d in deltas for t in d.tokens) == "a\N{OPTICAL DISC}z".encode()
        # Cut inside the character: one replacement for the part there is, and the bytes are in the records.
        cut = await client.generate_once(">", token_ids=True, max_tokens=3)
        assert cut.text == "a\N{REPLACEMENT CHARACTER}"
        assert b"".join(t.piece for t in cut.outputs[0].tokens) == "a\N{OPTICAL DISC}z".encode()[:3]


@pytest.mark.parametrize(
    ("stop", "text", "matched"),
    [
        ("cde", "ab", "cde"),  # over three tokens
        ("fg", "abcde", "fg"),  # at the very end
        ("cdx", "abcdefg", None),  # turns away: what was held back is released
        ("gh", "abcdefg", None),  # a beginning at the very end
        ("a", "", "a"),  # at once
    ],
)
async def test_no_part_of_a_stop_string_is_sent_and_nothing_else_is_lost(
    speaking_model: Speaking, tmp_path: Path, stop: str, text: str, matched: str | None
) -> None:
    async with serving(speaking_model("abcdefg"), tmp_path) as (_, client):
        result = await client.generate(">", stop=[stop]).result()
    finished = result.outputs[0].finished
    assert result.text == text
    if matched is None:
        assert (finished.reason, finished.stop_token_id) == (generation_pb2.FINISH_REASON_EOS, 2)
    else:
        assert (finished.reason, finished.stop_string) == (generation_pb2.FINISH_REASON_STOP_STRING, matched)


async def ends_with(client: AsyncClient, **options: Any) -> tuple[str, int, int]:
    result = await client.generate_once(">", **options)
    finished = result.outputs[0].finished
    return result.text, finished.reason, finished.num_tokens


async def test_what_ended_it_is_told_exactly(speaking_model: Speaking, tmp_path: Path) -> None:
    async with serving(speaking_model("abc"), tmp_path) as (_, client):
        assert await ends_with(client) == ("abc", generation_pb2.FINISH_REASON_EOS, 4)
        assert await ends_with(client, max_tokens=2) == ("ab", generation_pb2.FINISH_REASON_MAX_TOKENS, 2)
        stop = {"stop_token_ids": [3 + ord("b")]}
        assert await ends_with(client, **stop) == ("a", generation_pb2.FINISH_REASON_STOP_TOKEN, 2)
    async with serving(speaking_model("abc"), tmp_path, max_seq_len=3) as (_, client):
        assert await ends_with(client) == ("ab", generation_pb2.FINISH_REASON_CONTEXT_FULL, 2)


async def test_logprobs_are_of_the_token_and_of_the_best(random_model: Path, tmp_path: Path) -> None:
    async with serving(random_model, tmp_path) as (_, client):
        tokens = (await client.generate_once("the", max_tokens=5, top_logprobs=3)).outputs[0].tokens
    for token in tokens:
        values = [candidate.logprob for candidate in token.candidates]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert (token.candidates[0].id, token.rank) == (token.id, 1)
        assert token.logprob == values[0] < 0


@pytest.mark.parametrize("length", [1, 15, 16, 17, 48])
async def test_a_prompt_that_is_all_in_the_cache_gives_the_same_bytes(
    random_model: Path, tmp_path: Path, length: int
) -> None:
    prompt = [3 + (7 * n) % 200 for n in range(length)]
    async with serving(random_model, tmp_path, block_size=16) as (_, client):
        cold, warm = [await client.generate_once(prompt, max_tokens=8, top_logprobs=2) for _ in range(2)]
    assert cold.accepted.num_cached_tokens == 0
    assert warm.accepted.num_cached_tokens <= length - 1
    assert (warm.accepted.num_cached_tokens > 0) == (length > 16)
    assert warm.outputs == cold.outputs


async def test_a_long_prompt_reports_its_progress_seldom(random_model: Path, tmp_path: Path) -> None:
    # Two thousand steps, so that the reader wakes up in between however fast the machine is: news of a prompt that is
    # already done when the reader comes is left out.
    async with serving(random_model, tmp_path, prefill_chunk=1) as (_, client):
        events = [event async for event in client.generate([5] * 2000, max_tokens=1)]
    progress = [e.message.prefill_progress for e in events if e.kind == "prefill_progress"]
    assert events[0].kind == "accepted"
    assert 1 <= len(progress) < 50
    assert all(p.num_prompt_tokens == 2000 and 0 < p.num_processed_tokens <= 2000 for p in progress)
