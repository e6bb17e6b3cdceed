"""An engine takes what its Plan says, and what does not fit is refused with nothing left behind."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

from cyengine import DecodeMode, Engine, EngineConfig, Model, Request, TokenEvent, errors
from cyengine.types import Backend
from tests.tools.make_tiny_gguf import make_tiny_gguf

MB = 1 << 20

# Run apart, so that no other test's memory shows. Everything that a Plan counts gets touched: the weights by the first
# step, scratch by whole chunks beside all slots, every block of the pool by a prompt.
MEASURE = """
import ctypes, json, re, sys
from cyengine import DecodeMode, Engine, EngineConfig
from cyengine.types import Backend

def resident():
    with open("/proc/self/status") as status:
        return int(re.search(r"RssAnon:\\s+(\\d+)", status.read())[1]) << 10

path, mode = sys.argv[1], DecodeMode(int(sys.argv[2]))
config = EngineConfig(
    backend=Backend.CPU, num_threads=2, decode_mode=mode, kv_memory=40 << 20, max_slots=8, prefill_chunk=256
)
# What is loaded once for each process is there before, and what the first engine freed is not.
Engine(path, EngineConfig(backend=Backend.CPU, num_threads=2, kv_memory=4 << 20)).close()
ctypes.CDLL(None).malloc_trim(0)
before = resident()
engine = Engine(path, config)
plan = engine.info.plan
slots, left = [], plan.kv_num_blocks
while left > 0:
    slots.append(engine.acquire(lease_s=600))
    take = min(left, -(-plan.kv_num_blocks // 8))
    engine.prefill(slots[-1], [(i + 9 * len(slots)) % 250 for i in range(take * plan.block_size - 1)])
    left -= take
if mode is DecodeMode.PER_SLOT:
    engine.decode_step_slot(slots[0])
else:
    engine.decode_step_batch(slots)
assert engine.stats().blocks_used == plan.kv_num_blocks
print(json.dumps([plan.total_bytes, resident() - before]))
"""


def check_plan(path: pathlib.Path, mode: DecodeMode) -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE, str(path), str(int(mode))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    planned, taken = json.loads(done.stdout)
    assert planned > 40 * MB
    assert abs(taken / planned - 1) < 0.03, f"planned {planned}, taken {taken}"


@pytest.mark.parametrize("mode", [DecodeMode.BATCHED, DecodeMode.PER_SLOT])
def test_an_engine_takes_what_its_plan_says(tmp_path: pathlib.Path, mode: DecodeMode) -> None:
    path = tmp_path / "model.gguf"
    # Weights, keys and values in tens of megabytes, and little to compute.
    make_tiny_gguf(
        path,
        arch="llama",
        dtype="q8_0",
        hidden_size=128,
        intermediate_size=4096,
        num_layers=6,
        num_heads=8,
        num_kv_heads=8,
        head_dim=64,
        context_length=8192,
    )
    check_plan(path, mode)


@pytest.mark.parametrize("mode", [DecodeMode.BATCHED, DecodeMode.PER_SLOT])
def test_the_demo_model_takes_what_its_plan_says(demo_model: pathlib.Path, mode: DecodeMode) -> None:
    # note: its vocabulary alone is 3 % of what the batched engine takes.
    check_plan(demo_model, mode)


def mapped_and_resident() -> tuple[int, int]:
    status = pathlib.Path("/proc/self/status").read_text()
    sizes = dict(re.findall(r"(\w+):\s+(\d+) kB", status))
    return int(sizes["VmSize"]) << 10, int(sizes["RssAnon"]) << 10


@pytest.mark.parametrize("mode", [DecodeMode.BATCHED, DecodeMode.PER_SLOT, DecodeMode.AUTO])
def test_what_does_not_fit_at_creation_is_refused_and_leaves_nothing(
    tiny_model: pathlib.Path, mode: DecodeMode
) -> None:
    with Model(tiny_model) as model:
        config = EngineConfig(backend=Backend.CPU, num_threads=1, decode_mode=mode, kv_memory=64 * MB)
        needed = model.plan(config).total_bytes
        limited = EngineConfig(
            backend=Backend.CPU, num_threads=1, decode_mode=mode, kv_memory=64 * MB, memory_limit=needed - 1
        )
        plan = model.plan(limited)
        assert (plan.fits, plan.total_bytes, plan.device_total_bytes) == (False, needed, needed - 1)
        before = mapped_and_resident()
        for _ in range(20):
            with pytest.raises(errors.MemoryLimitError) as caught:
                Engine(model, limited)
            told = caught.value.details
            assert (int(told["bytes_needed"]), int(told["bytes_free"])) == (needed, needed - 1)
            assert told["remedy"]
        after = mapped_and_resident()
        assert after[0] - before[0] < 32 * MB, "twenty pools of 64 MB would show"
        assert after[1] - before[1] < 4 * MB
        enough = EngineConfig(
            backend=Backend.CPU, num_threads=1, decode_mode=mode, kv_memory=64 * MB, memory_limit=needed
        )
        Engine(model, enough).close()


def test_what_does_not_fit_at_the_first_call_is_refused_and_the_rest_goes_on(tiny_model: pathlib.Path) -> None:
    with Model(tiny_model) as model:
        config = EngineConfig(backend=Backend.CPU, num_threads=1, decode_mode=DecodeMode.AUTO, kv_memory=8 * MB)
        plan = model.plan(config)
        limit = plan.total_bytes + plan.kv_pool_bytes // 2  # room for one set and its pool, not for two
        limited = EngineConfig(
            backend=Backend.CPU, num_threads=1, decode_mode=DecodeMode.AUTO, kv_memory=8 * MB, memory_limit=limit
        )
        with Engine(model, limited) as engine:
            batched = Request([1, 2, 3], max_tokens=8, ignore_eos=True)
            expected = [event.token_id for event in engine.stream(batched) if isinstance(event, TokenEvent)]
            before = mapped_and_resident()
            for _ in range(20):
                for act in (
                    lambda: engine.submit(Request([1], decode_mode=DecodeMode.PER_SLOT)),
                    lambda: engine.acquire(DecodeMode.PER_SLOT),
                ):
                    with pytest.raises(errors.MemoryLimitError) as caught:
                        act()
                    told = caught.value.details
                    assert int(told["bytes_needed"]) > int(told["bytes_free"])
                    assert told["remedy"]
            after = mapped_and_resident()
            assert after[0] - before[0] < 4 * MB
            assert engine.stats().slots_used == 0
            again = [event.token_id for event in engine.stream(batched) if isinstance(event, TokenEvent)]
            assert again == expected
