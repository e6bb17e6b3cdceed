"""The prefix cache through a server: equal bytes, whoever computed them; one principal learns nothing of another."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import eventually, is_idle, serving, stats
from tests.tools.make_tiny_gguf import make_tiny_gguf
from xllm_client import NO_RETRY, AsyncClient, InvalidArgumentError

B = 16  # positions to a block


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [3 + (7 * i + 5 * seed + i * i % 11) % 200 for i in range(length)]


def chosen(result: Any) -> list[tuple[int, float, list[tuple[int, float]]]]:
    """Ids, log-probabilities and candidates, bit by bit."""
    return [
        (token.id, token.logprob, [(one.id, one.logprob) for one in token.candidates])
        for token in result.outputs[0].tokens
    ]


@pytest.mark.parametrize("decode_mode", ["batched", "per-slot"])
async def test_a_prompt_that_is_all_in_the_cache_gives_the_same_bits(
    random_model: Path, tmp_path: Path, decode_mode: str
) -> None:
    options: Any = {"max_tokens": 12, "ignore_eos": True, "top_logprobs": 3}
    async with serving(random_model, tmp_path, block_size=B, decode_mode=decode_mode) as (server, client):
        reader_prompt = prompt_of(4 * B, 1)
        alone = chosen(await client.generate_once(reader_prompt, **{**options, "max_tokens": 200}))
        for length in (1, B - 1, B, B + 1, 3 * B):
            prompt = prompt_of(length, length)
            bypassing = await client.generate_once(prompt, cache_bypass=True, **options)
            # A third stream reads blocks that are shared, its own ones and, by and by, those of the prompt.
            reader = asyncio.create_task(client.generate_once(reader_prompt, **{**options, "max_tokens": 200}))
            cold = await client.generate_once(prompt, **options)
            told = await client.estimate(prompt)
            warm = await client.generate_once(prompt, **options)
            cached = (length - 1) // B * B
            assert cold.usage.num_cached_tokens == bypassing.usage.num_cached_tokens == 0
            assert warm.usage.num_cached_tokens == told.num_cached_tokens == cached <= length - 1
            assert warm.accepted.num_cached_tokens == cached
            assert chosen(warm) == chosen(cold) == chosen(bypassing)
            assert chosen(await reader) == alone
        await eventually(lambda: is_idle(server))


async def test_salt_and_bypass_are_honoured(random_model: Path, tmp_path: Path) -> None:
    prompt = prompt_of(5 * B)
    async with serving(random_model, tmp_path, block_size=B) as (server, client):

        async def cached(**options: Any) -> int:
            return (await client.generate_once(prompt, max_tokens=2, **options)).usage.num_cached_tokens

        assert await cached(cache_bypass=True) == 0
        assert stats(server).blocks_cached == 0
        assert await cached() == 0
        assert await cached() == 4 * B
        assert await cached(cache_salt="a") == 0
        assert await cached(cache_salt="a") == 4 * B
        assert await cached(cache_salt="b") == 0
        assert await cached(cache_bypass=True) == 0
        with pytest.raises(InvalidArgumentError) as caught:
            await cached(cache_salt="é" * 129)
        assert [violation.field for violation in caught.value.field_violations] == ["spec.cache.salt"]


async def test_principals_learn_nothing_of_one_another(random_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    tokens = ["first-long-enough-token", "second-long-enough-token"]
    file.write_text("\n".join(tokens))
    file.chmod(0o600)
    prompt = prompt_of(5 * B)
    async with serving(random_model, tmp_path, block_size=B, token_file=file) as (server, _):
        endpoint = str(server.endpoints[0])
        async with (
            AsyncClient(endpoint, token=tokens[0], retry=NO_RETRY) as anna,
            AsyncClient(endpoint, token=tokens[1], retry=NO_RETRY) as bert,
        ):
            first = await anna.generate_once(prompt, max_tokens=4, token_ids=True)
            assert (await anna.estimate(prompt)).num_cached_tokens == 4 * B
            assert (await bert.estimate(prompt)).num_cached_tokens == 0
            # A salt that spells another's name is a salt of one's own.
            async with await anna.acquire_slot() as slot:
                name = slot.info.owner
            assert name
            for salt in ("", name, f"{len(name)}:{name}:"):
                other = await bert.generate_once(prompt, max_tokens=4, token_ids=True, cache_salt=salt)
                assert other.usage.num_cached_tokens == 0
                assert [t.id for t in other.outputs[0].tokens] == [t.id for t in first.outputs[0].tokens]
            async with await bert.acquire_slot() as slot:
                filled = await slot.prefill(prompt)
                assert filled.usage.num_cached_tokens == 4 * B  # bert's own
            assert (await anna.generate_once(prompt, max_tokens=4)).usage.num_cached_tokens == 4 * B


async def test_a_further_turn_of_a_conversation_computes_little_more_than_what_is_new(tmp_path: Path) -> None:
    path = tmp_path / "chat.gguf"
    make_tiny_gguf(path, context_length=4096)
    instructions = "Answer in few words. " * 160  # more than 2,000 tokens of this small vocabulary
    turns: list[Any] = [
        {"role": "system", "content": instructions},
        {"role": "user", "content": "What is an otter?"},
        {"role": "assistant", "content": "A river animal."},
        {"role": "user", "content": "What does it eat?"},
    ]
    options: Any = {"max_tokens": 16, "ignore_eos": True, "token_ids": True}
    async with serving(path, tmp_path) as (server, client):

        async def computed(messages: list[Any], **more: Any) -> tuple[int, list[int]]:
            before = stats(server)
            result = await client.chat_once(messages, **options, **more)
            after = stats(server)
            num_prompt = after.num_prompt_tokens - before.num_prompt_tokens
            num_cached = after.num_cached_tokens - before.num_cached_tokens
            assert (result.usage.num_prompt_tokens, result.usage.num_cached_tokens) == (num_prompt, num_cached)
            return num_prompt - num_cached, [token.id for token in result.outputs[0].tokens]

        first, _ = await computed(turns[:2])
        assert first > 2000
        again, ids = await computed(turns)
        without, expected = await computed(turns, cache_bypass=True)
        assert without > 2000
        assert again <= 0.15 * without
        assert ids == expected
