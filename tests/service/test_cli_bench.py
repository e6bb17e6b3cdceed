"""bench and top: which steps count, what a row says, and what a failure becomes."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner, Result

from cyengine.errors import MemoryLimitError
from cyengine.types import (
    AcceptedEvent,
    DecodeMode,
    EngineInfo,
    FinishedEvent,
    FinishReason,
    KvType,
    Request,
    Status,
    TensorInfo,
    TokenEvent,
)
from tests.service.fake_engine import PLAN, FakeModel
from xllm_client.v1 import admin_service_pb2
from xllm_service.cli import top
from xllm_service.cli.benchmark import measure as timing
from xllm_service.cli.benchmark import rows
from xllm_service.cli.benchmark.bandwidth import read_bandwidth
from xllm_service.cli.benchmark.machine import PeakMemory, describe_machine
from xllm_service.cli.benchmark.measure import Cell, measure
from xllm_service.cli.failures import Failure
from xllm_service.cli.main import app
from xllm_service.engine import LocalEngine, Model

INFO = EngineInfo("cpu", "Fake", "none", 2, "a test", DecodeMode.BATCHED, KvType.F16, 64, 512, 32, 16, 64, PLAN, 0.0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class SteppedCore:
    """An engine of one second a step: a chunk of prompts is prefilled, then everything that decodes gets a token."""

    def __init__(self, clock: Clock, info: EngineInfo = INFO, chunk: int = 32) -> None:
        self.info = info
        self.clock = clock
        self.chunk = chunk
        self.requests: dict[int, Request] = {}
        self.cancelled: list[int] = []
        self._prefilling: deque[list[int]] = deque()
        self._decoding: dict[int, int] = {}
        self._events: list[Any] = []

    def submit(self, request: Request) -> int:
        request_id = len(self.requests) + 1
        self.requests[request_id] = request
        self._prefilling.append([request_id, len(request.prompt)])
        return request_id

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)
        if self._decoding.pop(request_id, None) is not None:
            self._events.append(self._finished(request_id, Status.CANCELLED))

    def take_events(self, *, timeout_s: float) -> list[Any]:
        if not self._events:
            self._step()
        taken, self._events = self._events, []
        return taken

    def close(self) -> None:
        pass

    def _step(self) -> None:
        self.clock.now += 1.0
        for request_id in list(self._decoding):
            self._token(request_id)
        left = self.chunk
        while self._prefilling and left > 0:
            entry = self._prefilling[0]
            done = min(left, entry[1])
            entry[1] -= done
            left -= done
            if entry[1] == 0:
                self._prefilling.popleft()
                request_id = entry[0]
                self._events.append(
                    AcceptedEvent(
                        request_id, 0, 1, DecodeMode.BATCHED, 0, 0, len(self.requests[request_id].prompt), 0, 0
                    )
                )
                self._decoding[request_id] = 0
                self._token(request_id)

    def _token(self, request_id: int) -> None:
        index = self._decoding[request_id]
        self._events.append(TokenEvent(request_id, 5, index, b"x", "x", None, []))
        self._decoding[request_id] = index + 1
        if index + 1 == self.requests[request_id].max_tokens:
            del self._decoding[request_id]
            self._events.append(self._finished(request_id, Status.OK))

    def _finished(self, request_id: int, status: Status) -> FinishedEvent:
        return FinishedEvent(request_id, status, FinishReason.MAX_TOKENS, None, None, "", "", 0, 0, 0, 0, 0, 0, 0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    return clock


def engine_of(core: Any, model: Any = None) -> LocalEngine:
    return LocalEngine(Model(model or FakeModel(Path("m.gguf"))), core)


def test_one_request_is_timed_from_step_16(clock: Clock) -> None:
    core = SteppedCore(clock)
    sample = measure(engine_of(core), Cell(32, 128, 1), "s")
    assert sample.ttft_s == [1.0]
    assert sample.step_s == [1.0] * (127 - 15)
    assert sample.decode_mode == "batched"


def test_steps_count_while_all_requests_decode(clock: Clock) -> None:
    core = SteppedCore(clock)
    sample = measure(engine_of(core), Cell(32, 64, 8), "s")  # a chunk is one prompt: the last starts in step 8
    assert sorted(sample.ttft_s) == [float(step) for step in range(1, 9)]
    assert sample.prefill_s == [8.0]
    assert len(sample.step_s) == 63 - 15
    assert clock.now == 8 + 63  # the last request had all of its tokens
    # When the last request had its 64 tokens, none of the others had ended: all were cancelled then.
    assert sorted(core.cancelled) == list(range(1, 9))


def test_prompts_cut_smaller_than_a_chunk_are_waited_for(clock: Clock) -> None:
    # As an engine cuts them that keeps the gap between tokens short on a slow machine.
    core = SteppedCore(clock)
    core.chunk = 4
    sample = measure(engine_of(core), Cell(32, 16, 8), "s")
    assert sample.prefill_s == [64.0]
    assert clock.now == 64 + 15


def test_a_run_leaves_an_empty_engine(clock: Clock) -> None:
    core = SteppedCore(clock)
    engine = engine_of(core)
    measure(engine, Cell(32, 32, 4), "a")
    assert not core._decoding
    assert not core._events
    assert measure(engine, Cell(32, 32, 4), "b").prefill_s == [4.0]


def test_no_two_prompts_are_alike(clock: Clock) -> None:
    core = SteppedCore(clock)
    engine = engine_of(core)
    measure(engine, Cell(32, 32, 2), "a")
    measure(engine, Cell(32, 32, 2), "b")
    prompts = {tuple(request.prompt) for request in core.requests.values()}
    assert len(prompts) == 4
    assert all(request.ignore_eos for request in core.requests.values())


def test_a_cap_without_room_is_refused_by_name(clock: Clock) -> None:
    with pytest.raises(Failure, match="cap 512 has no room for 500 \\+ 13 tokens"):
        measure(engine_of(SteppedCore(clock)), Cell(500, 13, 1), "s")


def test_requests_that_cannot_decode_together_are_no_row(clock: Clock) -> None:
    core = SteppedCore(clock, replace(INFO, max_seq_len=36))
    with pytest.raises(Failure, match="before all of them decoded together"):
        measure(engine_of(core), Cell(32, 4, 8), "s")


def test_few_steps_count_by_half() -> None:
    assert timing.counted_steps([0.0, 1.0, 3.0, 6.0, 10.0]) == [3.0, 4.0]
    assert timing.counted_steps([0.0, 1.0]) == [1.0]
    assert timing.counted_steps([0.0]) == []


def test_percentile_is_a_value_that_was_measured() -> None:
    assert timing.percentile([4.0, 1.0, 3.0, 2.0], 90) == 4.0
    assert timing.percentile([float(i) for i in range(1, 11)], 90) == 9.0
    assert timing.percentile([1.0], 90) == 1.0


@pytest.mark.parametrize(
    ("names", "batched", "per_slot"),
    [
        (["token_embd.weight"], 100, 3 * 4 * 50),  # the embedding is the head too: all of it is read
        (["token_embd.weight", "output.weight"], 100, 3 * 4 * 50),
        (["token_embd.weight", "output.weight", "blk.0.ffn_up.weight"], 200, 3 * 4 * 100),
    ],
)
def test_a_step_reads_every_weight_but_the_rows_of_an_embedding(names: list[str], batched: int, per_slot: int) -> None:
    class Some(FakeModel):
        def tensors(self) -> list[TensorInfo]:
            return [TensorInfo(name, "q8_0", (5, 10), 100, 0) for name in names]

    model = Model(Some(Path("m.gguf")))
    assert rows.weight_bytes(model, "batched", 3) == batched
    assert rows.weight_bytes(model, "per-slot", 3) == per_slot


# ---------------------------------------------------------------- the verb


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: Clock) -> Any:
    """Run `xllm bench m.gguf` on the stepped engine; int4 does not fit in memory."""
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("xllm_service.engine.open_model", lambda path, **_: Model(FakeModel(path)))

    def open_engine(model: Model, config: Any) -> LocalEngine:
        from xllm_service.engine import to_service_error

        if config.kv_type == "int4":
            raise to_service_error(MemoryLimitError("does not fit; shrink it"))
        info = replace(INFO, max_seq_len=config.max_seq_len or 256, max_slots=config.max_slots)
        return LocalEngine(model, SteppedCore(clock, info))

    monkeypatch.setattr("xllm_service.engine.open_engine", open_engine)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["bench", "m.gguf", "--read-bandwidth", "0.001", *arguments])

    return run


def test_bench_writes_machine_and_rows(bench: Any, tmp_path: Path) -> None:
    result = bench(
        "--batch", "1,2", "--cap", "256,512", "--prompt-tokens", "32", "--gen-tokens", "64", "--json", "b.json"
    )
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "b.json").read_text())
    assert {"cpu", "driver", "commit", "date", "device", "threads", "read_bandwidth"} <= found["machine"].keys()
    assert [(row["cap"], row["bs"]) for row in found["rows"]] == [(256, 1), (256, 2), (512, 1), (512, 2)]
    row = found["rows"][1]
    expected = {
        "model": "m.gguf", "arch": "fake", "backend": "cpu", "device": "Fake", "decode_mode": "batched",
        "path": "cpu/none", "kv_type": "f16", "cap": 256, "prompt_tokens": 32, "gen_tokens": 64, "bs": 2,
        "ttft_ms": 1500.0, "step_ms": 1000.0, "step_ms_p90": 1000.0, "n_steps": 48, "tpot_ms": 500.0,
        "prefill_tok_s": 32.0, "decode_tok_s": 2.0, "weight_bytes": 4000, "kv_bytes": 64 * (32 + 32) * 2,
        "floor_ms": (4000 + 64 * 64 * 2) / 1e6 * 1e3,
    }  # fmt: skip
    assert {key: row[key] for key in expected} == expected
    assert row["peak_bytes"] > 0
    assert "error" not in row


def test_a_row_that_failed_says_why_and_the_others_stand(bench: Any) -> None:
    result = bench("--kv-type", "int4,f16", "--json", "-")
    assert result.exit_code == 0, result.output
    failed, measured = json.loads(result.stdout)["rows"]
    assert failed["error"] == "does not fit; shrink it"
    assert (failed["kv_type"], failed["bs"], failed["decode_mode"]) == ("int4", 1, "batched")
    assert measured["step_ms"] == 1000.0


def test_bench_fails_when_every_row_did(bench: Any) -> None:
    result = bench("--kv-type", "int4")
    assert result.exit_code == 1
    assert "does not fit; shrink it" in result.stdout


def test_the_table_names_mode_and_path_in_every_row(bench: Any) -> None:
    lines = bench("--batch", "1,4", "--gen-tokens", "64").stdout.splitlines()
    assert sum("batched" in line and "cpu/none" in line for line in lines) == 2


def test_repetitions_are_all_counted(bench: Any) -> None:
    found = json.loads(bench("--repeat", "3", "--gen-tokens", "64", "--json", "-").stdout)
    assert found["rows"][0]["n_steps"] == 3 * 48


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = bench("--plot", "x.png")
    assert result.exit_code == 1
    assert "matplotlib" in result.stderr
    assert "xllm[plot]" in result.stderr


def test_the_machine_is_described() -> None:
    machine = describe_machine()
    assert machine["physical_cores"] >= 1
    assert machine["memory_bytes"] > 1 << 20
    json.dumps(machine)


def test_peak_memory_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = PeakMemory()
    block = bytearray(64 << 20)
    block[::4096] = b"x" * len(block[::4096])
    high = peak.bytes()
    del block
    peak.reset()
    assert peak.bytes() < high - (32 << 20)


def test_the_read_bandwidth_is_one_that_memory_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xllm_service.cli.benchmark.bandwidth._BUFFER_BYTES", 64 << 20)
    assert 1e8 < read_bandwidth(1) < 1e13


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [("NVIDIA H200", None, 4.66e12), ("NVIDIA H200", 1e12, 1e12), ("NVIDIA Unheard-of", None, None)],
)
def test_the_read_bandwidth_of_a_gpu_is_known_or_given(name: str, given: float | None, expected: float | None) -> None:
    engine = SteppedCore(Clock(), replace(INFO, device_kind="cuda", device_name=name))
    sweep = rows.Sweep([1], 2, [1], [0], ["f16"], bandwidth=given)
    machine: dict[str, Any] = {}
    rows._describe_device(cast(LocalEngine, engine), sweep, machine)
    assert machine.get("read_bandwidth") == expected


# ---------------------------------------------------------------- top


def load_at(second: int, **counts: Any) -> admin_service_pb2.EngineLoad:
    load = admin_service_pb2.EngineLoad(model="m", num_slots=4, num_free_slots=1, num_kv_blocks=10, **counts)
    load.snapshot_time.seconds = second
    return load


def test_rates_are_over_the_time_between_two_looks() -> None:
    before = load_at(10, num_steps=100, num_generated_tokens=100, num_prompt_tokens=50)
    now = load_at(12, num_steps=150, num_generated_tokens=300, num_prompt_tokens=50)
    found = top.describe(now, before)
    assert (found["decode_tok_s"], found["prefill_tok_s"], found["steps_per_s"]) == (100.0, 0.0, 25.0)
    assert (found["slots_used"], found["slots_total"]) == (3, 4)


def test_there_are_no_rates_at_first_or_after_a_restart() -> None:
    before = load_at(10, num_steps=100)
    assert top.describe(before, None)["decode_tok_s"] is None
    assert top.describe(load_at(12, num_steps=5), before)["decode_tok_s"] is None


def test_the_report_has_a_line_for_every_row_and_every_failure(bench: Any, tmp_path: Path) -> None:
    from bench.report import report

    found = json.loads(bench("--kv-type", "f16,int4", "--batch", "1,2", "--gen-tokens", "64", "--json", "-").stdout)
    text = report(found)
    assert sum(line.startswith("| batched | cpu/none | f16 |") for line in text.splitlines()) == 2
    assert sum(line.endswith("does not fit; shrink it") for line in text.splitlines()) == 2
    assert "### m.gguf" in text
    assert found["machine"]["date"][:10] in text
