"""The engines of one server, by name: made, found and ended while the others go on."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from xllm_service import logs
from xllm_service.admission import LiveGenerations
from xllm_service.config import ServeConfig
from xllm_service.digest import FileDigest, shard_paths
from xllm_service.engine import AsyncEngine, CoreEngine, DecodeMode, EngineStats, Model
from xllm_service.errors import InvalidFieldError, Reason, ServiceError
from xllm_service.servicers.ownership import Ownership, Seat

# Opens the model and starts its engine; blocks. Tests put an engine without a model in its place.
Loader = Callable[[ServeConfig], tuple[Model, CoreEngine]]

_POLL_S = 0.02  # between looks at calls that are given time to finish
_END_S = 1.0  # for calls that were cut off to say so

_log = logs.get_logger("engines")


class Hosted:
    """One engine and the name that calls use for it.

    Attributes:
        name: unique in the server.
        config: its settings: the server's own, with what CreateEngine changed.
        is_ending: it takes no new work.
        owners: who acquired a slot last, by its index.
        seats: which call ran in a slot last, by its index.
    """

    def __init__(self, config: ServeConfig) -> None:
        self.name = config.model_name
        self.config = config
        self.is_ending = False
        self.owners: dict[int, Ownership] = {}
        self.seats: dict[int, Seat] = {}
        self._engine: AsyncEngine | None = None
        self.end_at = math.inf
        self.ending: asyncio.Task[Ended] | None = None

    @property
    def is_loaded(self) -> bool:
        """Its engine runs."""
        return self._engine is not None

    @property
    def engine(self) -> AsyncEngine:
        """The engine; only once it is loaded, as for whatever `Roster.get` returns."""
        assert self._engine is not None
        return self._engine

    def start(self, engine: AsyncEngine) -> None:
        """Serve with `engine` from now on."""
        self._engine = engine

    def problem(self) -> str | None:
        """Why it cannot serve, "" while it can, None while it loads or ends."""
        return None if self._engine is None or self.is_ending else self._engine.problem()


@dataclass(frozen=True, slots=True)
class Ended:
    """What ending an engine did: calls cut short, and memory given back."""

    num_calls: int
    freed_bytes: int


class Roster:
    """Makes, finds and ends engines. Every name is taken once: from the moment its engine begins to load.

    Args:
        config: the server's settings; its model is listed from the start, and loaded by `load`.
        loader: opens a model and starts its engine.
        generations: the calls that run, which end before their engine does.
    """

    def __init__(self, config: ServeConfig, loader: Loader, generations: LiveGenerations) -> None:
        self.on_change: Callable[[], object] = lambda: None
        self.on_engine: Callable[[AsyncEngine], object] = lambda _: None  # told of each that begins to run
        self._config = config
        self._loader = loader
        self._generations = generations
        self._hosted: dict[str, Hosted] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self.first = self._reserve(config)

    def __iter__(self) -> Iterator[Hosted]:
        """All of them by name, those that load or end included."""
        return iter([self._hosted[name] for name in sorted(self._hosted)])

    def loaded(self) -> list[Hosted]:
        """Those whose engine runs, by name."""
        return [hosted for hosted in self if hosted.is_loaded and not hosted.engine.is_closed]

    def stats(self) -> dict[str, EngineStats]:
        """A snapshot of each engine that runs."""
        return {hosted.name: hosted.engine.stats() for hosted in self.loaded()}

    def problems(self) -> dict[str, str | None]:
        """Of each: why it cannot serve, "" while it can, None while it loads or ends."""
        return {hosted.name: hosted.problem() for hosted in self}

    def find(self, model: str) -> Hosted | None:
        """Return the engine of a name, in whatever state; None when there is none."""
        return self._hosted.get(model)

    def get(self, model: str, field: str) -> Hosted:
        """Return a loaded engine that takes work; see Served.get."""
        names = ", ".join(sorted(self._hosted))
        if not model and len(self._hosted) > 1:
            raise InvalidFieldError([(field, f"expected the name of a model, as several are served: {names}")])
        hosted = next(iter(self._hosted.values()), None) if not model else self._hosted.get(model)
        if hosted is None:
            is_or_are = f"{names} {'are' if len(self._hosted) > 1 else 'is'}" if names else "no model is"
            what = f"no model {model!r} is served here; {is_or_are}" if model else "no model is served; CreateEngine"
            raise ServiceError(Reason.MODEL_NOT_FOUND, what, resource=("xllm.v1.Model", model))
        if not hosted.is_loaded:
            raise ServiceError(Reason.LOADING, f"{hosted.name} is still loading; try again in a moment")
        if hosted.is_ending:
            raise ServiceError(Reason.DRAINING, f"{hosted.name} is about to end and takes no new work")
        return hosted

    async def load_first(self) -> Hosted:
        """Load the server's own model. Raises ServiceError."""
        await self._load(self.first, "")
        return self.first

    async def create(self, config: ServeConfig, expected_digest: str) -> Hosted:
        """Load one more model; returns when it serves.

        Where the caller gives up meanwhile, the load goes on, as none can be cut short, and what it brings is given
        back. Raises ServiceError: ENGINE_EXISTS, MODEL_DIGEST_MISMATCH, and what the loader raises; then nothing stays.
        """
        hosted = self._reserve(config)
        task = self._background(self._load(hosted, expected_digest))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            self._background(self._discard(task, hosted))
            raise
        return hosted

    async def destroy(self, name: str, grace_s: float) -> Ended:
        """End an engine: no new work, time for its calls to finish, then its memory back.

        Goes on when the caller gives up. A second call joins the first, and may shorten its grace. Raises
        MODEL_NOT_FOUND, LOADING.
        """
        hosted = self._hosted.get(name)
        if hosted is None:
            raise ServiceError(Reason.MODEL_NOT_FOUND, f"no engine {name!r} is here", resource=("xllm.v1.Engine", name))
        if not hosted.is_loaded:
            raise ServiceError(Reason.LOADING, f"{name} is still loading; end it when that is done")
        hosted.end_at = min(hosted.end_at, time.monotonic() + grace_s)
        if hosted.ending is None:
            hosted.ending = self._background(self._end(hosted))
        ended: Ended = await asyncio.shield(hosted.ending)
        _log.info("ended %s", name, extra=logs.facts(cut_short=ended.num_calls, freed_bytes=ended.freed_bytes))
        return ended

    async def close(self) -> None:
        """End every engine, at once, and wait for what is being loaded. Calling it again is harmless."""
        while self._tasks:
            for hosted in self:
                hosted.end_at = 0.0
            await asyncio.wait(set(self._tasks))
        for hosted in self.loaded():
            hosted.end_at = 0.0
            await self._end(hosted)

    def _reserve(self, config: ServeConfig) -> Hosted:
        hosted = Hosted(config)
        if hosted.name in self._hosted:
            raise ServiceError(
                Reason.ENGINE_EXISTS,
                f"an engine {hosted.name} exists; choose another name, or end it with DestroyEngine",
                resource=("xllm.v1.Engine", hosted.name),
            )
        self._hosted[hosted.name] = hosted
        self.on_change()
        return hosted

    async def _load(self, hosted: Hosted, expected_digest: str) -> None:
        started = time.monotonic()
        config = hosted.config
        try:
            if expected_digest:
                await _check_file(config, expected_digest)
            model, core = await asyncio.to_thread(self._loader, config)
        except BaseException:
            del self._hosted[hosted.name]
            self.on_change()
            raise
        hosted.start(
            AsyncEngine(core, model, stuck_after_s=config.stuck_after, stall_allowance_s=config.stall_allowance)
        )
        self.on_engine(hosted.engine)
        model.digest.start()
        self.on_change()
        info = hosted.engine.info
        _log.info(
            "serving %s",
            hosted.name,
            extra=logs.facts(
                seconds=round(time.monotonic() - started, 3),
                device=f"{info.device_kind} ({info.device_name})",
                kernels=info.kernels,
                threads=info.num_threads,
                threads_limit=info.threads_limit,
                decode_mode=info.decode_mode.name.lower(),
                max_slots=info.max_slots,
                max_seq_len=info.max_seq_len,
                kv_pool_bytes=info.plan.kv_pool_bytes,
            ),
        )

    async def _discard(self, loading: asyncio.Task[None], hosted: Hosted) -> None:
        with contextlib.suppress(ServiceError):
            await loading
            hosted.end_at = 0.0
            await self._end(hosted)

    async def _end(self, hosted: Hosted) -> Ended:
        hosted.is_ending = True
        self.on_change()
        name = hosted.name
        while self._generations.count(name) and time.monotonic() < hosted.end_at:
            await asyncio.sleep(min(_POLL_S, max(0.0, hosted.end_at - time.monotonic())))
        num_calls = self._generations.count(name)
        self._generations.end_all(ServiceError(Reason.DRAINING, f"{name} ends; the time to finish is over"), name)
        deadline = time.monotonic() + _END_S
        while self._generations.count(name) and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        freed_bytes = _held_bytes(hosted.engine)
        model = hosted.engine.model
        await hosted.engine.close()
        await asyncio.to_thread(model.close)
        if self._hosted.get(name) is hosted:
            del self._hosted[name]
        self.on_change()
        return Ended(num_calls, freed_bytes)

    def _background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _check_file(config: ServeConfig, expected: str) -> None:
    """Raise MODEL_DIGEST_MISMATCH for another file, before anything of it is loaded."""
    digest = FileDigest(shard_paths(config.model))
    try:
        actual = await asyncio.to_thread(digest.wait)
    finally:
        digest.stop()
    if actual != expected:
        raise ServiceError(
            Reason.MODEL_DIGEST_MISMATCH,
            f"the model's file is {actual}, not {expected}; nothing was loaded",
            metadata={"expected": expected, "actual": actual},
        )


def _held_bytes(engine: AsyncEngine) -> int:
    """Memory an engine has taken: pool, scratch, tables, and the weight sets that were loaded."""
    plan = engine.info.plan
    weights = {DecodeMode.BATCHED: plan.raw_weight_bytes, DecodeMode.PER_SLOT: plan.dequantized_weight_bytes}
    loaded = sum(weights[mode] for mode in engine.loaded_modes)
    return loaded + plan.kv_pool_bytes + plan.scratch_bytes + plan.table_bytes
