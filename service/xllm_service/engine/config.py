"""The engine's part of the server's configuration."""

from __future__ import annotations

from cyengine.types import Backend, DecodeMode, EngineConfig, KvType
from xllm_service.config import ServeConfig


def engine_config(config: ServeConfig, *, log_fd: int | None = None) -> EngineConfig:
    """Return the engine's part of a configuration."""
    return EngineConfig(
        backend=Backend[config.backend.upper()],
        decode_mode=DecodeMode[config.decode_mode.upper().replace("-", "_")],
        kv_type=KvType[config.kv_type.upper()],
        max_slots=config.max_slots,
        max_seq_len=config.max_seq_len,
        allow_long_context=config.allow_long_context,
        prefill_chunk=config.prefill_chunk,
        block_size=config.block_size,
        max_queue=config.max_queue,
        num_threads=config.threads,
        device_index=config.device,
        kv_memory=config.kv_memory,
        max_token_gap_s=config.max_token_gap,
        memory_limit=config.memory_limit,
        instruction_set=config.instruction_set,
        log_fd=log_fd,
    )
