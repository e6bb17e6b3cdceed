"""What went wrong elsewhere with honest requests (numbers 6 and 13 to 18), each as a client of the server meets it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.serving import eventually, is_idle, server_process, serving, stop
from tests.tools.make_tiny_gguf import make_tiny_gguf
from tests.tools.tiny_vocab import USER_DEFINED_TOKEN
from xllm_client import AsyncClient
from xllm_client.v1 import chat_pb2, generation_pb2, model_service_pb2, model_service_pb2_grpc, sampling_pb2

DRAWS = 40


@pytest.fixture(scope="module")
def flat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose logits are all 0: biases alone decide."""
    path = tmp_path_factory.mktemp("models") / "flat.gguf"
    options: dict[str, Any] = {"dtype": "f16", "tied": False, "head_dtype": "f32"}
    rows = len(make_tiny_gguf(path, **options).tokens.tokens)
    make_tiny_gguf(path, **options, tensors={"output.weight": np.zeros((rows, 64), np.float32)})
    return path


async def chosen(
    client: AsyncClient, logits: Mapping[int, float], prompt: list[int] | None = None, tokens: int = 1, **options: Any
) -> list[int]:
    """The ids that a request with these logits, the rest 0, ends up with."""
    reply = await client.generate_once(
        prompt or [7], logit_bias=logits, max_tokens=tokens, ignore_eos=True, token_ids=True, **options
    )
    return [token.id for token in reply.outputs[0].tokens]


async def drawn(client: AsyncClient, logits: Mapping[int, float], **options: Any) -> set[int]:
    """What comes of many seeds."""
    calls = [chosen(client, logits, seed=seed, **options) for seed in range(DRAWS)]
    return {token for ids in await asyncio.gather(*calls) for token in ids}


# ---- 13: neutral values, and the order of samplers


async def test_neutral_values_are_neutral_and_the_order_is_the_one_that_is_echoed(
    flat_model: Path, tmp_path: Path
) -> None:
    logits = {40: 92.0, 41: 91.9, 42: 91.8}
    async with serving(flat_model, tmp_path) as (_, client):
        reference = [await chosen(client, {}, temperature=1.5, seed=seed, tokens=8) for seed in range(3)]
        for neutral in ({"top_k": 0}, {"top_k": 10**6}, {"top_p": 1.0}, {"min_p": 0.0}, {"repetition_penalty": 1.0}):
            ids = [await chosen(client, {}, temperature=1.5, seed=seed, tokens=8, **neutral) for seed in range(3)]
            assert ids == reference, neutral
        assert await drawn(client, logits, temperature=1.0) == {40, 41, 42}
        for one in ({"top_p": 0.0}, {"top_k": 1}, {"min_p": 1.0}):
            assert await drawn(client, logits, temperature=1.0, **one) == {40}, one
        assert await drawn(client, {50: 92.0, 43: 92.0, 42: 91.9}, temperature=1.0, min_p=1.0) == {43, 50}
        for seed in (0, 2**64 - 1):
            assert await chosen(client, {60: 5.0, 45: 5.0}, temperature=0.0, seed=seed) == [45]
        # Temperature first keeps one token of these; last it would keep two.
        assert await drawn(client, {40: 92.0, 41: 91.2, 42: 90.1}, temperature=0.4, top_p=0.75) == {40}
        reply = await client.generate_once([7], max_tokens=1, top_k=10**6)
    effective = reply.accepted.effective
    order = list(effective.sampler_order)
    assert order.index(sampling_pb2.SAMPLER_STAGE_TEMPERATURE) < order.index(sampling_pb2.SAMPLER_STAGE_TOP_P)
    assert effective.sampling.top_k == 0, "off, whatever its spelling"
    assert effective.sampling.HasField("temperature") and effective.sampling.temperature == 0


# ---- 14: penalties count what they say


@pytest.mark.parametrize(
    ("penalty", "expected"),
    [
        ({"frequency_penalty": 2.0, "presence_penalty": 2.0}, [40, 41, 40, 41]),
        ({"repetition_penalty": 1.3}, [41, 40, 40, 40]),
    ],
)
async def test_penalties_cold_cached_in_a_batch_and_in_a_slot(
    flat_model: Path, tmp_path: Path, penalty: dict[str, float], expected: list[int]
) -> None:
    prompt, logits = [40, 7, 40, 8, 40, 9, 40, 40, *range(100, 140)], {40: 5.0, 41: 4.9}
    async with serving(flat_model, tmp_path, block_size=16) as (_, client):
        for _turn in ("cold", "cached"):
            assert await chosen(client, logits, prompt, 4, **penalty) == expected
        others = [chosen(client, logits, [*prompt, 200 + n], 4) for n in range(4)]
        mine, *rest = await asyncio.gather(chosen(client, logits, prompt, 4, **penalty), *others)
        assert mine == expected and rest == [[40] * 4] * 4
        async with await client.acquire_slot() as slot:
            assert await chosen(client, logits, prompt, 4, slot=slot.ref, **penalty) == expected


# ---- 15: stop strings and thinking


@pytest.fixture
def thinking_model(tmp_path: Path) -> Path:
    """A model whose template opens the reasoning section, and which says a text after it; no byte occurs twice."""
    said = "Q: 4?</think>Yes."
    chain = [3 + ord("\n"), *(3 + byte for byte in said.encode()), 2]
    path = tmp_path / "thinking.gguf"
    template = "{{ messages[0].content }}{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"
    make_tiny_gguf(
        path, tied=False, dtype="f32", hidden_size=256, next_token=dict(itertools.pairwise(chain)), next_default=2,
        chat_template=template,
    )  # fmt: skip
    return path


ASK = [{"role": "user", "content": "even?"}]


async def test_stops_apply_to_the_answer_and_the_thinking_is_no_answer(thinking_model: Path, tmp_path: Path) -> None:
    async with serving(thinking_model, tmp_path) as (server, client):
        for reply in (await client.chat_once(ASK, stop=["Q:"]), await client.chat(ASK, stop=["Q:"]).result()):
            (output,) = reply.outputs
            assert (output.reasoning_text, output.text) == ("Q: 4?", "Yes.")
            assert output.finished.reason == generation_pb2.FINISH_REASON_EOS
            assert reply.accepted.starts_in_reasoning
        cut = await client.chat_once(ASK, max_tokens=3)
        assert (cut.outputs[0].reasoning_text, cut.outputs[0].text) == ("Q: ", "")
        assert cut.outputs[0].finished.reason == generation_pb2.FINISH_REASON_MAX_TOKENS
        assert cut.usage.num_reasoning_tokens == 3
        stopped = await client.chat_once(ASK, stop=["s."], token_ids=True)
        assert (stopped.outputs[0].reasoning_text, stopped.outputs[0].text) == ("Q: 4?", "Ye")
        assert stopped.outputs[0].finished.stop_string == "s."
        assert stopped.usage.num_generated_tokens == len(stopped.outputs[0].tokens) == len("Q: 4?</think>Yes.")
        async with await client.acquire_slot() as slot:
            owned = await client.chat_once(ASK, stop=["Q:"], slot=slot.ref)
            assert (owned.outputs[0].reasoning_text, owned.outputs[0].text) == ("Q: 4?", "Yes.")
        await eventually(lambda: is_idle(server))


async def test_raw_text_stops_anywhere(thinking_model: Path, tmp_path: Path) -> None:
    async with serving(thinking_model, tmp_path) as (_, client):
        reply = await client.generate_once("<think>\n", stop=["4?"])
        whole = await client.generate_once("<think>\n")
    assert (reply.text, reply.outputs[0].reasoning_text) == ("Q: ", "")
    assert reply.outputs[0].finished.stop_string == "4?"
    assert whole.text == "Q: 4?</think>Yes." and not whole.accepted.starts_in_reasoning


# ---- 6: what answers are read with stays plain text in a message


async def test_a_message_cannot_spell_the_markers_of_the_service(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    template = "{% for m in messages %}<tool_call>{{ m.content }}{% endfor %}<think>\n{# </tool_call> </think> #}"
    model = make_tiny_gguf(path, chat_template=template)
    marker = model.tokens.id_of(USER_DEFINED_TOKEN)
    async with serving(path, tmp_path) as (server, client):
        said = "wait <tool_call> now <think>"
        chat = chat_pb2.Chat(messages=[chat_pb2.ChatMessage(role="user", parts=[chat_pb2.Part(text=said)])])
        make_stub: Any = model_service_pb2_grpc.ModelServiceStub
        stub = make_stub(client.channel)
        reply = await stub.RenderChat(model_service_pb2.RenderChatRequest(chat=chat, include_token_ids=True))
        assert reply.text == f"<tool_call>{said}<think>\n"
        assert list(reply.token_ids).count(marker) == 1, "the template's own"
        assert server.served.get("").engine.model.decode(reply.token_ids) == reply.text
        assert (await client.tokenize(said)).count(marker) == 1, "in a text it is the token that it spells"
        answer = await client.chat_once([{"role": "user", "content": "</think>"}], max_tokens=1)
        assert answer.accepted.starts_in_reasoning, "what a message says ends nothing"


# ---- 16: the whole prompt is in the cache


@pytest.mark.parametrize("length", [1, 15, 16, 17, 48])
async def test_a_prompt_sent_twice_while_a_third_stream_reads_its_blocks(
    random_model: Path, tmp_path: Path, length: int
) -> None:
    prompt = [3 + (7 * n) % 200 for n in range(length)]
    async with serving(random_model, tmp_path, block_size=16) as (_, client):
        alone = await client.generate_once([*prompt, 9], max_tokens=64, token_ids=True)
    async with serving(random_model, tmp_path, block_size=16) as (_, client):
        cold = await client.generate_once(prompt, max_tokens=8, top_logprobs=2)
        third = client.generate([*prompt, 9], max_tokens=64, token_ids=True)
        await anext(third)
        warm = await client.generate_once(prompt, max_tokens=8, top_logprobs=2)
        shared = await third.result()
    assert warm.accepted.num_cached_tokens <= length - 1
    assert warm.outputs == cold.outputs
    assert shared.outputs[0].tokens == alone.outputs[0].tokens


# ---- 17: the prompt the model was trained on


async def test_a_rendered_prompt_is_the_templates_own(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    template = (
        "{% for m in messages %}\n<u>{{ m.content }}</u>\n{% endfor %}\n"
        "{% if tools %}{{ tools[0]|tojson }}\n{% endif %}{% if add_generation_prompt %}\n<a>\n{% endif %}\n"
    )
    make_tiny_gguf(path, chat_template=template)
    tool = {"name": "it's <b>", "b": 5, "a": [1, 2.0, True, None], "u": "é/—"}
    messages = [{"role": "user", "content": "hi"}]
    async with serving(path, tmp_path) as (_, client):
        plain = await client.render_chat(messages)
        with_tool = await client.render_chat(messages, tools=[tool])
        ids = await client.tokenize("<u>hi</u>\n<a>\n")
        used = await client.chat_once(messages, max_tokens=1)
    assert plain == "<u>hi</u>\n<a>\n"
    written = '{"name": "it\'s <b>", "b": 5, "a": [1, 2.0, true, null], "u": "é/—"}'
    assert json.dumps(tool, ensure_ascii=False) == written
    assert with_tool == f"<u>hi</u>\n{written}\n<a>\n"
    assert used.accepted.num_prompt_tokens == len(ids)


# ---- 18: the container is the machine


def test_threads_follow_the_affinity_and_the_flag_wins(random_model: Path, tmp_path: Path) -> None:
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})  # inherited by the server
    try:
        with server_process(random_model, tmp_path) as (process, _):
            _, log = stop(process, signal.SIGTERM)
        assert "threads=1 threads_limit=affinity" in log
        with server_process(random_model, tmp_path, "--threads", "2") as (process, _):
            _, log = stop(process, signal.SIGTERM)
        assert "threads=2 threads_limit=" in log and "affinity" not in log.partition("threads_limit=")[2].split()[0]
    finally:
        os.sched_setaffinity(0, mine)
