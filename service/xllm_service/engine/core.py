"""The engine below: what is used of it, and how it is made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Protocol

import cyengine
from cyengine.errors import XllmError
from cyengine.types import (
    DecodeMode,
    EngineInfo,
    EngineStats,
    Event,
    Request,
    Slot,
    SlotInfo,
    TokenMask,
)
from xllm_service import convert
from xllm_service.config import ServeConfig
from xllm_service.engine.config import engine_config
from xllm_service.engine.failures import to_service_error
from xllm_service.engine.model import Model
from xllm_service.errors import Reason


class CoreEngine(Protocol):
    """What is used of cyengine.Engine; tests put an engine without a model in its place."""

    @property
    def info(self) -> EngineInfo:
        """Device and options in effect."""

    @property
    def event_fd(self) -> int:
        """Readable while events wait."""

    def submit(self, request: Request) -> int:
        """Queue a request."""

    def submit_outputs(self, request: Request, num_outputs: int) -> list[int]:
        """Queue several outputs of a request."""

    def cancel(self, request_id: int) -> None:
        """End a request."""

    def push_masks(self, masks: Iterable[TokenMask]) -> None:
        """Say which tokens constrained requests may choose next."""

    def take_events(self) -> list[Event]:
        """Take what has happened."""

    def drain(self) -> None:
        """Take no new requests."""

    def stats(self) -> EngineStats:
        """A snapshot."""

    def slots(self) -> list[SlotInfo]:
        """A snapshot."""

    def slot(self, index: int) -> SlotInfo:
        """A snapshot of one."""

    def acquire(
        self, decode_mode: DecodeMode = DecodeMode.AUTO, *, lease_s: float = 60.0, slot: int | None = None
    ) -> Slot:
        """Own a free slot."""

    def renew(self, slot: Slot, lease_s: float = 60.0) -> SlotInfo:
        """Start a lease anew."""

    def release(self, slot: Slot) -> SlotInfo:
        """End an ownership."""

    def count_cached(
        self,
        token_ids: Sequence[int],
        *,
        decode_mode: DecodeMode = DecodeMode.AUTO,
        cache_salt: bytes = b"",
        bypass_cache: bool = False,
    ) -> int:
        """What the prefix cache holds of a prompt."""

    def fork(self, slot: Slot, lease_s: float = 60.0) -> Slot:
        """Own a further slot that continues a READY one."""

    def submit_prefill(
        self,
        slot: Slot,
        token_ids: Sequence[int],
        *,
        max_duration_s: float = 0.0,
        cache_salt: bytes = b"",
        bypass_cache: bool = False,
    ) -> int:
        """Begin to compute a prompt into a slot."""

    def submit_decode_slot(self, slot: Slot, request: Request) -> int:
        """Begin to generate in a per-slot slot."""

    def submit_decode_batch(self, entries: Sequence[tuple[Slot, Request]]) -> list[int]:
        """Begin to generate in batched slots, in lock-step."""

    def close(self) -> None:
        """Stop and free everything."""


def create_core(model: Model, config: ServeConfig, *, log_fd: int | None = None) -> CoreEngine:
    """Load the weights and start the step loop; waits for both. Raises ServiceError, MEMORY with its Plan."""
    options = engine_config(config, log_fd=log_fd)
    try:
        engine: CoreEngine = cyengine.Engine(model.core, options)
        return engine
    except XllmError as error:
        failure = to_service_error(error)
        if failure.reason is Reason.MEMORY:
            if config.memory_limit:
                failure.message += ", or raise memory_limit"
            with contextlib.suppress(XllmError):
                plan = convert.plan_message(model.core.plan(options), convert.plan_context(options))
                plan.fits, plan.remedy = False, failure.metadata.get("remedy", plan.remedy)
                failure.extra.append(plan)
        raise failure from error
