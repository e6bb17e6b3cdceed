"""Slots through Python: own one, fill it, decode it, give it back; races for ownership; several engines at once."""

import pathlib
import threading
import time

import numpy as np
import pytest

from cyengine import (
    DecodeMode,
    Engine,
    EngineConfig,
    FinishedEvent,
    FinishReason,
    Request,
    SamplingParams,
    Slot,
    SlotState,
    Status,
    TokenEvent,
    errors,
)
from cyengine.types import Backend
from tests.tools.make_tiny_gguf import make_tiny_gguf

PROMPT = [(7 * i + 3) % 90 for i in range(50)]
BOTH = [DecodeMode.BATCHED, DecodeMode.PER_SLOT]


def config(mode: DecodeMode = DecodeMode.AUTO, max_slots: int = 8) -> EngineConfig:
    return EngineConfig(
        backend=Backend.CPU, num_threads=1, decode_mode=mode, block_size=16, kv_memory=8 << 20, max_slots=max_slots
    )


def generated(engine: Engine, prompt: list[int], count: int, mode: DecodeMode, seed: int | None = None) -> list[int]:
    sampling = SamplingParams(temperature=0.8, seed=seed) if seed is not None else SamplingParams()
    request = Request(prompt, sampling, max_tokens=count, ignore_eos=True, decode_mode=mode)
    return [event.token_id for event in engine.stream(request) if isinstance(event, TokenEvent)]


def finished(engine: Engine, request_id: int) -> tuple[list[int], FinishedEvent]:
    ids: list[int] = []
    while True:
        for event in engine.take_events(request_id, -1.0):
            if isinstance(event, TokenEvent):
                ids.append(event.token_id)
            if isinstance(event, FinishedEvent):
                return ids, event


def start(engine: Engine, slot: Slot, request: Request) -> int:
    if slot.decode_mode is DecodeMode.PER_SLOT:
        return engine.submit_decode_slot(slot, request, private=True)
    return engine.submit_decode_batch([(slot, request)], private=True)[0]


def wait_until_free(engine: Engine) -> None:
    end = time.monotonic() + 20
    while (stats := engine.stats()).slots_used or stats.blocks_used:
        assert time.monotonic() < end, f"never given back: {stats}"
        time.sleep(0.0005)


@pytest.mark.parametrize("mode", BOTH)
def test_steps_streams_and_requests_give_the_same_tokens(tiny_model: pathlib.Path, mode: DecodeMode) -> None:
    with Engine(tiny_model, config()) as engine:
        expected = generated(engine, PROMPT, 12, mode, seed=5)
        sampling = SamplingParams(temperature=0.8, seed=5)
        slot = engine.acquire(mode)
        assert slot.decode_mode is mode
        done = engine.prefill(slot, PROMPT)
        assert (done.finish_reason, done.num_prompt_tokens) == (FinishReason.PREFILLED, len(PROMPT))
        steps = []
        for _ in range(4):
            if mode is DecodeMode.PER_SLOT:
                steps.append(engine.decode_step_slot(slot, sampling).token_id)
            else:
                steps.append(engine.decode_step_batch([slot], sampling)[0].token_id)
        ids, end = finished(engine, start(engine, slot, Request(sampling=sampling, max_tokens=8, ignore_eos=True)))
        assert end.status is Status.OK
        assert steps + ids == expected
        info = engine.slot(slot.index)
        assert (info.state, info.num_tokens, info.is_acquired) == (SlotState.READY, len(PROMPT) + 12, True)
        assert 0 < info.lease_left_s <= 60
        engine.release(slot)
        wait_until_free(engine)


def test_a_step_gives_the_logits_that_it_chose_from(tiny_model: pathlib.Path) -> None:
    with Engine(tiny_model, config()) as engine:
        one, two = engine.acquire(DecodeMode.BATCHED), engine.acquire(DecodeMode.PER_SLOT)
        third = engine.acquire(DecodeMode.BATCHED)
        engine.prefill(one, PROMPT)
        engine.prefill(two, PROMPT)
        engine.prefill(third, PROMPT[:20])
        first, other = engine.decode_step_batch([one, third], logits=True)
        second = engine.decode_step_slot(two, logits=True)
        rows = [np.frombuffer(step.logits or b"", np.float32) for step in (first, other, second)]
        vocab_size = engine.model.info.vocab_size
        assert all(row.shape == (vocab_size,) for row in rows)
        assert [int(row.argmax()) for row in rows] == [first.token_id, other.token_id, second.token_id]
        assert np.linalg.norm(rows[0] - rows[2]) < 0.05 * np.linalg.norm(rows[2])
        assert not np.array_equal(rows[0], rows[2]), "one set of weights is quantised, the other is not"


def test_slots_of_a_batch_advance_together(tiny_model: pathlib.Path) -> None:
    with Engine(tiny_model, config(DecodeMode.BATCHED)) as engine:
        prompts = [PROMPT[: 10 + 7 * i] for i in range(4)]
        expected = [generated(engine, prompt, 9, DecodeMode.BATCHED) for prompt in prompts]
        slots = [engine.acquire() for _ in prompts]
        for slot, prompt in zip(slots, prompts, strict=True):
            engine.prefill(slot, prompt)
        before = engine.stats().num_steps
        ids = engine.submit_decode_batch(
            [(slot, Request(max_tokens=9, ignore_eos=True)) for slot in slots], private=True
        )
        assert [finished(engine, request_id)[0] for request_id in ids] == expected
        assert engine.stats().num_steps - before == 9


def test_a_prompt_appended_continues_the_slot(tiny_model: pathlib.Path) -> None:
    with Engine(tiny_model, config()) as engine:
        for mode in BOTH:
            slot = engine.acquire(mode)
            engine.prefill(slot, PROMPT[:20])
            said, _ = finished(engine, start(engine, slot, Request(max_tokens=5, ignore_eos=True)))
            engine.prefill(slot, PROMPT[20:])
            more, _ = finished(engine, start(engine, slot, Request(max_tokens=6, ignore_eos=True)))
            assert more == generated(engine, PROMPT[:20] + said + PROMPT[20:], 6, mode)
            engine.release(slot)


def test_refusals_have_types_and_change_nothing(engine: Engine) -> None:
    slot = engine.acquire(lease_s=30)
    before = engine.slot(slot.index)
    assert before.state is SlotState.ACQUIRED
    with pytest.raises(errors.SlotStateError):
        engine.decode_step_batch([slot])
    with pytest.raises(errors.StaleEpochError):
        engine.renew(Slot(slot.index, slot.epoch + 1))
    for index in (-1, 99):
        with pytest.raises(errors.NotFoundError):
            engine.release(Slot(index, 1))
        with pytest.raises(errors.NotFoundError):
            engine.slot(index)
    for bad in (Slot(2**40, 1), Slot(0, -1), Slot(0, 2**64)):
        with pytest.raises(errors.InvalidArgumentError):
            engine.release(bad)
    with pytest.raises(errors.NoFreeSlotError):
        engine.acquire(slot=slot.index)
    for lease in (0.0, -1.0, float("nan"), 1e9):
        with pytest.raises(errors.InvalidArgumentError) as caught:
            engine.acquire(lease_s=lease)
        assert caught.value.details["field"] == "lease_s"
    with pytest.raises(errors.InvalidArgumentError):
        engine.prefill(slot, [])
    with pytest.raises(errors.InvalidArgumentError):
        engine.decode_step_batch([])
    with pytest.raises(errors.InvalidArgumentError):
        engine.decode_step_batch([slot], [])
    after = engine.slot(slot.index)
    assert (after.state, after.num_tokens, after.epoch) == (before.state, before.num_tokens, before.epoch)
    assert engine.release(slot).state is SlotState.FREE
    with pytest.raises(errors.StaleEpochError):
        engine.renew(slot)


def test_the_end_of_a_lease_ends_the_call(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "endless.gguf"
    # Far more tokens than there is time for: the tiny model's own context is full after some milliseconds.
    make_tiny_gguf(path, arch="llama", dtype="q4_1", context_length=131_072)
    with Engine(path, EngineConfig(backend=Backend.CPU, num_threads=1)) as engine:
        slot = engine.acquire()
        engine.prefill(slot, PROMPT)
        request_id = start(engine, slot, Request(ignore_eos=True))
        engine.renew(slot, 0.005)
        _, end = finished(engine, request_id)
        assert end.status is Status.LEASE_LOST
        wait_until_free(engine)
        with pytest.raises(errors.LeaseLostError):
            engine.prefill(slot, PROMPT)


def test_a_slot_without_blocks_left_stays_ready(tiny_model: pathlib.Path) -> None:
    plan = Engine(tiny_model, config()).info.plan
    small = EngineConfig(backend=Backend.CPU, num_threads=1, block_size=16, kv_memory=4 * 16 * plan.kv_bytes_per_token)
    with Engine(tiny_model, small) as engine:
        slot = engine.acquire()
        engine.prefill(slot, PROMPT)
        ids, end = finished(engine, start(engine, slot, Request(max_tokens=40, ignore_eos=True)))
        assert end.status is Status.KV_EXHAUSTED
        assert len(ids) == 15  # four blocks hold 64 positions, the last token chosen has no place yet
        assert engine.slot(slot.index).state is SlotState.READY
        with pytest.raises(errors.KvExhaustedError):
            engine.decode_step_batch([slot])
        engine.release(slot)
        wait_until_free(engine)


# ---- races; the core's own tests have them 200 times over with more ways to win ----

SLICE = 20


def race(tiny_model: pathlib.Path, mode: DecodeMode, repetitions: int) -> None:
    """Decode in one thread while another ends the ownership, by lease, release, or release and acquisition."""
    with Engine(tiny_model, config(mode, max_slots=1)) as engine:
        for i in range(repetitions):
            slot = engine.acquire()
            engine.prefill(slot, PROMPT[: 5 + i % 40])
            successors: list[Slot] = []

            def end(slot: Slot = slot, i: int = i, successors: list[Slot] = successors) -> None:
                time.sleep(0.0002 * (i % 7))
                if i % 3 == 0:
                    engine.renew(slot, 1e-4)
                    return
                engine.release(slot)
                while i % 3 == 2 and not successors:
                    try:
                        successors.append(engine.acquire())
                    except errors.NoFreeSlotError:
                        time.sleep(0)

            thread = threading.Thread(target=end)
            thread.start()
            # A slot that is full before the other thread gets its turn ends this one's, too.
            with pytest.raises((errors.StaleEpochError, errors.LeaseLostError, errors.SlotStateError)):
                while True:
                    _, event = finished(engine, start(engine, slot, Request(max_tokens=3, ignore_eos=True)))
                    assert event.status in (Status.OK, Status.LEASE_LOST)
            thread.join()
            for successor in successors:
                assert engine.slot(0).epoch == successor.epoch == slot.epoch + 1
                engine.release(successor)
            wait_until_free(engine)


@pytest.mark.parametrize("mode", BOTH)
def test_ownership_races_with_decode(tiny_model: pathlib.Path, mode: DecodeMode) -> None:
    race(tiny_model, mode, SLICE)


@pytest.mark.slow
@pytest.mark.parametrize("mode", BOTH)
def test_ownership_races_with_decode_200_times_each(tiny_model: pathlib.Path, mode: DecodeMode) -> None:
    race(tiny_model, mode, 3 * 200)


# ---- several engines in one process ----


def test_engines_beside_each_other_give_the_bytes_they_give_alone(tmp_path: pathlib.Path) -> None:
    models = [tmp_path / "llama.gguf", tmp_path / "qwen.gguf"]
    make_tiny_gguf(models[0], arch="llama", dtype="q4_1")
    make_tiny_gguf(models[1], arch="qwen3", dtype="q8_0")
    setups = [
        (models[0], config(DecodeMode.BATCHED, max_slots=3)),
        (models[1], config(DecodeMode.PER_SLOT, max_slots=2)),
        (models[1], config(DecodeMode.AUTO, max_slots=5)),
    ]

    def answers(engine: Engine) -> list[list[int]]:
        out = [generated(engine, PROMPT, 30, DecodeMode.AUTO, seed) for seed in range(3)]
        slot = engine.acquire()
        engine.prefill(slot, PROMPT[:30])
        out.append(finished(engine, start(engine, slot, Request(max_tokens=30, ignore_eos=True)))[0])
        engine.release(slot)
        return out

    alone = []
    for path, setup in setups:
        with Engine(path, setup) as engine:
            alone.append(answers(engine))

    engines = [Engine(path, setup) for path, setup in setups]
    doomed = Engine(models[0], config(DecodeMode.AUTO, max_slots=7))
    live = [doomed.submit(Request(PROMPT, ignore_eos=True)) for _ in range(4)]
    together: list[list[list[int]]] = [[] for _ in engines]

    def work(i: int) -> None:
        together[i] = answers(engines[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(engines))]
    for thread in threads:
        thread.start()
    assert len(live) == 4
    doomed.close()  # in the middle of its work and of theirs
    for thread in threads:
        thread.join(60)
    assert together == alone
    for engine in engines:
        wait_until_free(engine)
        engine.close()
