"""The sweep: which cells are measured, and the row that each one becomes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xllm_service.cli.benchmark.bandwidth import GPU_READ_BANDWIDTH, read_bandwidth
from xllm_service.cli.benchmark.machine import PeakMemory
from xllm_service.cli.benchmark.measure import Cell, Sample, measure, median, percentile
from xllm_service.cli.failures import Failure, describe

if TYPE_CHECKING:
    from xllm_service.config import ServeConfig
    from xllm_service.engine import LocalEngine, Model

Row = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """What to measure: every combination of the lists.

    Attributes:
        caps: max_seq_len; 0 is the model's context length.
        repeat: runs per cell.
        bandwidth: bytes per second that the device reads; None: measured on a CPU, known for some GPUs.
    """

    prompt_tokens: Sequence[int]
    gen_tokens: int
    batches: Sequence[int]
    caps: Sequence[int]
    kv_types: Sequence[str]
    repeat: int = 1
    bandwidth: float | None = None

    @property
    def cells(self) -> list[Cell]:
        """What is measured with each engine."""
        return [Cell(prompt, self.gen_tokens, bs) for prompt in self.prompt_tokens for bs in self.batches]


def run_sweep(
    path: Path, settings: Mapping[str, Any], sweep: Sweep, machine: dict[str, Any], on_row: Callable[[Row], None]
) -> None:
    """Measure everything, one engine for each KV type and cap, and hand out rows as they come.

    A cell that cannot be measured becomes a row with `error`, and the sweep goes on. `machine` gets what is known only
    once there is an engine: device, threads, read bandwidth. Raises ServiceError when the model cannot be opened.
    """
    from xllm_service.config import load_config
    from xllm_service.engine import open_engine, open_model

    peak = PeakMemory()
    with open_model(path, pretokenizer=settings.get("pretokenizer")) as model:
        for kv_type in sweep.kv_types:
            for cap in sweep.caps:
                flags = {**settings, "kv_type": kv_type, "max_seq_len": cap, "max_slots": max(sweep.batches)}
                config = load_config(path, flags)
                base = _base_row(model, config)
                with contextlib.ExitStack() as stack:
                    try:
                        engine = stack.enter_context(open_engine(model, config))
                        measure(engine, Cell(8, 4, 1), "warm-up")
                    except Exception as error:  # whatever it is, it is this engine's, and the others go on
                        for cell in sweep.cells:
                            on_row({**base, **_cell_row(cell), "error": describe(error).message})
                        continue
                    _describe_device(engine, sweep, machine)
                    for row in _measure_all(engine, sweep, machine, peak):
                        on_row({**base, **row})


def _measure_all(engine: LocalEngine, sweep: Sweep, machine: dict[str, Any], peak: PeakMemory) -> Iterator[Row]:
    info = engine.info
    for number, cell in enumerate(sweep.cells):
        row = {**_engine_row(engine), **_cell_row(cell)}
        sample = Sample()
        peak.reset()  # the engine itself stays in it; what an earlier cell or the read test took does not
        try:
            for run in range(sweep.repeat):
                sample.add(measure(engine, cell, f"{number} {run}"))
            if not sample.step_s:
                raise Failure("no step was timed; raise --gen-tokens to at least 2")
        except Exception as error:
            yield {**row, "error": describe(error).message}
            continue
        row["decode_mode"] = sample.decode_mode
        row |= _times(cell, sample)
        row |= _floor(engine, cell, sample.decode_mode, machine.get("read_bandwidth"))
        # note: of a GPU the process does not know its peak; the Plan is what it may take.
        row["peak_bytes"] = peak.bytes() if info.device_kind == "cpu" else None
        row["planned_bytes"] = info.plan.total_bytes
        yield row


def _base_row(model: Model, config: ServeConfig) -> Row:
    return {
        "model": config.model.name,
        "arch": model.info.architecture,
        "backend": config.backend,
        "device": None,
        "decode_mode": config.decode_mode,
        "path": None,
        "kv_type": config.kv_type,
        "cap": config.max_seq_len or model.info.context_length,
    }


def _engine_row(engine: LocalEngine) -> Row:
    info = engine.info
    return {
        "backend": info.device_kind,
        "device": info.device_name,
        "path": f"{info.device_kind}/{info.kernels}",
        "kv_type": info.kv_type.name.lower(),
        "cap": info.max_seq_len,
        "threads": info.num_threads,
    }


def _cell_row(cell: Cell) -> Row:
    return {"prompt_tokens": cell.prompt_tokens, "gen_tokens": cell.gen_tokens, "bs": cell.bs}


def _times(cell: Cell, sample: Sample) -> Row:
    step_s = median(sample.step_s)
    return {
        "ttft_ms": _ms(median(sample.ttft_s)),
        "ttft_ms_max": _ms(max(sample.ttft_s)),
        "step_ms": _ms(step_s),
        "step_ms_p90": _ms(percentile(sample.step_s, 90)),
        "n_steps": len(sample.step_s),
        "tpot_ms": _ms(step_s / cell.bs),
        "prefill_tok_s": round(cell.bs * cell.prompt_tokens / median(sample.prefill_s), 2),
        "decode_tok_s": round(cell.bs / step_s, 2),
    }


def _floor(engine: LocalEngine, cell: Cell, decode_mode: str, bandwidth: float | None) -> Row:
    """Return the bytes that a step must read, and the time that takes at the device's read bandwidth."""
    weights = weight_bytes(engine.model, decode_mode, cell.bs)
    # The depth in the middle of what is measured, which is what the median step reads.
    context = cell.prompt_tokens + cell.gen_tokens // 2
    kv = engine.info.plan.kv_bytes_per_token * context * cell.bs
    return {
        "floor_ms": _ms((weights + kv) / bandwidth) if bandwidth else None,
        "weight_bytes": weights,
        "kv_bytes": kv,
    }


def weight_bytes(model: Model, decode_mode: str, bs: int) -> int:
    """Return the bytes of weights that one step reads: raw ones once; dequantised ones (f32) once for each slot."""
    tensors = model.tensors()
    has_head = any(tensor.name == "output.weight" for tensor in tensors)
    # An embedding that is not the head too is read row by row.
    read = [tensor for tensor in tensors if not (has_head and tensor.name == "token_embd.weight")]
    if decode_mode == "per-slot":
        return bs * sum(4 * prod(tensor.dims) for tensor in read)
    return sum(tensor.size_bytes for tensor in read)


def _describe_device(engine: LocalEngine, sweep: Sweep, machine: dict[str, Any]) -> None:
    info = engine.info
    if "device" in machine:
        return
    machine |= {"device": info.device_name, "threads": info.num_threads, "threads_limit": info.threads_limit}
    if sweep.bandwidth is not None:
        machine |= {"read_bandwidth": sweep.bandwidth, "read_bandwidth_source": "--read-bandwidth"}
    elif info.device_kind == "cpu":
        measured = read_bandwidth(info.num_threads)
        machine |= {"read_bandwidth": measured, "read_bandwidth_source": f"memchr, {info.num_threads} threads"}
    elif known := GPU_READ_BANDWIDTH.get(info.device_name):
        machine |= {"read_bandwidth": known, "read_bandwidth_source": "known for this GPU"}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)
