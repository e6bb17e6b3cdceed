"""CreateEngine: which file may be opened, and the settings of the engine that is made for it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xllm_client.v1 import admin_service_pb2, decode_mode_pb2, plan_pb2
from xllm_service.config import BACKENDS, ServeConfig
from xllm_service.errors import Reason, ServiceError
from xllm_service.models import CATALOGUE, ModelFetchError, cached_model, pull_model
from xllm_service.validation import Checker

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MAX_GRACE_S = 86400.0
_DECODE_MODES: Mapping[int, str] = {
    decode_mode_pb2.DECODE_MODE_AUTO: "auto",
    decode_mode_pb2.DECODE_MODE_BATCHED: "batched",
    decode_mode_pb2.DECODE_MODE_PER_SLOT: "per-slot",
}
_KV_TYPES: Mapping[int, str] = {
    plan_pb2.KV_TYPE_UNSPECIFIED: "f16",
    plan_pb2.KV_TYPE_F16: "f16",
    plan_pb2.KV_TYPE_INT8: "int8",
    plan_pb2.KV_TYPE_INT4: "int4",
    plan_pb2.KV_TYPE_F32: "f16",  # a per-slot engine's own, which no setting names
}


def validate_engine(request: admin_service_pb2.CreateEngineRequest, config: ServeConfig) -> ServeConfig:
    """Return the settings of a new engine: the server's, with what the request says. Its `model` is still to be found.

    Raises InvalidFieldError with every field that is at fault.
    """
    check = Checker()
    if not _NAME.fullmatch(request.name):
        check.refuse("name", "expected 1 to 64 of A-Z a-z 0-9 . _ -")
    if not request.source:
        check.refuse("source", "expected a name, or a path below the server's model folder, found nothing")
    check.digest(request.expected_digest, "expected_digest")
    check.decode_mode(request.decode_mode, "decode_mode")
    if request.backend not in ("", *BACKENDS):
        check.refuse("backend", f"expected cpu, cuda or nothing, found {request.backend!r}")
    is_per_slot = request.decode_mode == decode_mode_pb2.DECODE_MODE_PER_SLOT
    if request.kv_type not in _KV_TYPES:
        check.refuse("kv_type", f"expected a value of KvType, found {request.kv_type}")
    elif is_per_slot and request.kv_type not in (plan_pb2.KV_TYPE_UNSPECIFIED, plan_pb2.KV_TYPE_F32):
        check.refuse("kv_type", "a PER_SLOT engine keeps keys and values as F32; leave it unset")
    elif not is_per_slot and request.kv_type == plan_pb2.KV_TYPE_F32:
        check.refuse("kv_type", "F32 is for PER_SLOT engines; expected F16, INT8 or INT4")

    def integer(name: str, default: int, low: int, high: int) -> int:
        return check.integer(request, name, "", default, low, high) or 0

    options: dict[str, Any] = {
        "name": request.name,
        "decode_mode": _DECODE_MODES.get(request.decode_mode, "auto"),
        "backend": request.backend or "auto",
        "max_slots": integer("max_slots", config.max_slots, 1, config.max_slots),
        "max_seq_len": integer("max_seq_len", 0, 1, 2**31 - 1),
        "allow_long_context": request.allow_long_context,
        "kv_type": _KV_TYPES.get(request.kv_type, "f16"),
        "kv_memory": integer("kv_memory_bytes", 0, 1, 2**63 - 1),
        "memory_limit": integer("memory_limit_bytes", 0, 1, 2**63 - 1),
        "threads": integer("num_threads", 0, 1, 4096),
        "prefill_chunk": integer("prefill_chunk_tokens", config.prefill_chunk, 1, 8192),
        "max_queue": integer("max_queue_requests", config.max_queue, 0, 1_000_000),
    }
    check.raise_if_any()
    return dataclasses.replace(config, **options)


def validate_grace(request: Any, default_s: float) -> float:
    """Return the grace of DestroyEngine and Drain in seconds. Raises InvalidFieldError."""
    check = Checker()
    grace_s = check.span(request, "grace", "", default_s, high=_MAX_GRACE_S, open_low=False)
    check.raise_if_any()
    return grace_s or 0.0


def find_model(source: str, model_dir: Path | None) -> Path:
    """Return the file that a caller may have loaded: a path below the model folder, or a known name.

    Blocks: a name of the catalogue that is not here yet is fetched. Names on the hub are found where `xllm pull` has
    put them. No other file is opened, through whatever links. Raises MODEL_NOT_FOUND, which tells no path.
    """
    path = _below(model_dir, source) if model_dir is not None else None
    if path is not None:
        return path
    try:
        path = cached_model(source)
        if path is None and source in CATALOGUE:
            path = pull_model(source)
    except ModelFetchError:
        path = None
    if path is None:
        where = "nor a file below the model folder" if model_dir is not None else "and no --model-dir is set"
        raise ServiceError(
            Reason.MODEL_NOT_FOUND,
            f"{source!r} is no model name known here, {where}; `xllm pull` on the server's machine fetches one",
            resource=("xllm.v1.Model", source),
        )
    return path


def _below(folder: Path, source: str) -> Path | None:
    """Return a file below `folder`, with every link followed; None for anything else."""
    try:
        root = folder.resolve()
        path = (root / source).resolve()
        return path if path.is_relative_to(root) and path.is_file() else None
    except (OSError, ValueError, RuntimeError):  # too long, a NUL in it, a loop of links
        return None
