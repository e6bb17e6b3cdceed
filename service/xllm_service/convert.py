"""Between messages of the contract and plain values. Knows no rule about what is allowed: that is validation.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf import duration_pb2, timestamp_pb2

from xllm_client.v1 import decode_mode_pb2, generation_pb2, plan_pb2


def duration(seconds: float) -> duration_pb2.Duration:
    """Return seconds as a Duration; never less than zero."""
    message = duration_pb2.Duration()
    message.FromNanoseconds(max(0, round(seconds * 1e9)))
    return message


def seconds(message: duration_pb2.Duration) -> float:
    """Return a Duration in seconds, as it was written: also one that is out of range."""
    return message.seconds + message.nanos / 1e9


def timestamp(unix_s: float) -> timestamp_pb2.Timestamp:
    """Return a point in time, given in seconds since 1970."""
    message = timestamp_pb2.Timestamp()
    message.FromNanoseconds(round(unix_s * 1e9))
    return message


def decode_mode(value: int) -> Any:
    """Return a DecodeMode of the contract; the engine's numbers are the same."""
    return decode_mode_pb2.DecodeMode.Name(value)


def usage_message(num_prompt: int, num_cached: int, num_generated: int) -> generation_pb2.Usage:
    """Return the tokens a generation used."""
    return generation_pb2.Usage(
        num_prompt_tokens=num_prompt, num_cached_tokens=num_cached, num_generated_tokens=num_generated
    )


_KV_TYPES = (plan_pb2.KV_TYPE_F16, plan_pb2.KV_TYPE_INT8, plan_pb2.KV_TYPE_INT4)


def plan_context(options: Any) -> dict[str, Any]:
    """Return the options that a Plan message repeats, of an EngineConfig or an EngineInfo."""
    kind = getattr(options, "device_kind", None)
    backend = str(kind) if kind is not None else options.backend.name.lower()
    return {
        "decode_mode": decode_mode(int(options.decode_mode)),
        "backend": "" if backend == "auto" else backend,
        "kv_type": _KV_TYPES[int(options.kv_type)],
        "max_slots": options.max_slots,
        "max_seq_len": options.max_seq_len,
        "prefill_chunk_tokens": options.prefill_chunk,
    }


def plan_message(plan: Any, context: dict[str, Any], *, loaded: Iterable[int] = ()) -> plan_pb2.Plan:
    """Return an engine's Plan with the options it was made for.

    `loaded` names the modes whose weights are in memory.
    """
    mode = decode_mode_pb2.DecodeMode.Value(context["decode_mode"])
    modes = (1, 2) if mode == decode_mode_pb2.DECODE_MODE_AUTO else (mode,)
    sizes = {1: plan.raw_weight_bytes, 2: plan.dequantized_weight_bytes}
    in_memory = set(loaded)
    return plan_pb2.Plan(
        weight_sets=[
            plan_pb2.WeightSetPlan(
                decode_mode=decode_mode(number),
                size_bytes=sizes[number],
                is_loaded=number in in_memory,
            )
            for number in modes
        ],
        kv_bytes_per_token=plan.kv_bytes_per_token,
        block_size=plan.block_size,
        num_kv_blocks=plan.kv_num_blocks,
        kv_pool_bytes=plan.kv_pool_bytes,
        scratch_bytes=plan.scratch_bytes,
        table_bytes=plan.table_bytes,
        mapped_bytes=plan.mapped_bytes,
        total_bytes=plan.total_bytes,
        memory_total_bytes=plan.device_total_bytes,
        memory_free_bytes=plan.device_free_bytes,
        fits=plan.fits,
        remedy="" if plan.fits else "lower --kv-memory or --max-slots, or take a smaller model",
        **context,
    )
