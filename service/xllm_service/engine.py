"""The engine as the service sees it; the only module that imports cyengine.

`Model` wraps an opened file: tokenizer, chat template, facts. `open_engine` runs one in this process, for the command
line. `AsyncEngine` puts one behind an event loop: a reader on the engine's descriptor wakes up once per step and hands
each request's events to its own bounded stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import statistics
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import cyengine
from cyengine.errors import XllmError
from cyengine.types import (
    AcceptedEvent,
    Backend,
    Candidate,
    DecodeMode,
    EndToken,
    EngineConfig,
    EngineInfo,
    EngineStats,
    Event,
    Fact,
    FinishedEvent,
    FinishReason,
    KvType,
    Metadata,
    ModelInfo,
    Plan,
    PrefillEvent,
    Request,
    SamplingParams,
    Slot,
    SlotInfo,
    SlotState,
    Status,
    TensorInfo,
    TextPiece,
    TokenEvent,
)
from xllm_service import convert
from xllm_service.chat_template import ChatTemplate, Piece, TemplateRenderError, TemplateUnusableError
from xllm_service.config import ServeConfig
from xllm_service.digest import FileDigest, shard_paths
from xllm_service.errors import Reason, ServiceError
from xllm_service.logs import get_logger
from xllm_service.validation import DecodeChoices

__all__ = [
    "AcceptedEvent",
    "AsyncEngine",
    "Bounds",
    "Candidate",
    "CoreEngine",
    "DecodeMode",
    "EngineInfo",
    "EngineStats",
    "Event",
    "Fact",
    "FinishReason",
    "FinishedEvent",
    "LocalEngine",
    "Model",
    "Plan",
    "PrefillEvent",
    "Progress",
    "Slot",
    "SlotInfo",
    "SlotState",
    "Status",
    "TokenEvent",
    "build_id",
    "engine_config",
    "open_engine",
    "open_model",
    "to_service_error",
    "version",
]

version: str = cyengine.__version__
build_id: str = cyengine.build_id

_CONTROL = 3  # tokenizer.ggml.token_type of a CONTROL token
_MAX_BUFFERED_TOKENS = 16384  # of one stream whose client does not read
_NUM_STEP_SAMPLES = 9  # steps that the typical step time is taken from: some five seconds of work
_WATCH_S = 0.5  # between looks at the heartbeat and at clients that do not read

_log = get_logger("engine")


# ---------------------------------------------------------------- errors

_REASONS: Mapping[Status, Reason] = {
    Status.INVALID_ARGUMENT: Reason.INVALID_FIELD,
    Status.PROMPT_TOO_LONG: Reason.PROMPT_TOO_LONG,
    Status.NEVER_FITS: Reason.NEVER_FITS,
    Status.NOT_FOUND: Reason.MODEL_NOT_FOUND,
    Status.ALREADY_EXISTS: Reason.REQUEST_ID_IN_USE,
    Status.DECODE_MODE_MISMATCH: Reason.DECODE_MODE_MISMATCH,
    Status.SLOT_STATE: Reason.SLOT_STATE,
    Status.NO_TOKENIZER: Reason.NO_TOKENIZER,
    Status.NO_CHAT_TEMPLATE: Reason.NO_CHAT_TEMPLATE,
    Status.QUEUE_FULL: Reason.QUEUE_FULL,
    Status.QUEUE_TIMEOUT: Reason.QUEUE_TIMEOUT,
    Status.NO_FREE_SLOT: Reason.NO_FREE_SLOT,
    Status.KV_EXHAUSTED: Reason.KV_EXHAUSTED,
    Status.MEMORY: Reason.MEMORY,
    Status.STALE_EPOCH: Reason.STALE_EPOCH,
    Status.LEASE_LOST: Reason.LEASE_LOST,
    Status.PERMISSION_DENIED: Reason.FOREIGN_SLOT,
    Status.CANCELLED: Reason.CANCELLED,
    Status.DEADLINE_EXCEEDED: Reason.DEADLINE_EXCEEDED,
    Status.MODEL_MALFORMED: Reason.INVALID_MODEL,
    Status.MODEL_TRUNCATED: Reason.TRUNCATED_MODEL,
    Status.MODEL_UNSUPPORTED: Reason.UNSUPPORTED_MODEL,
    Status.UNIMPLEMENTED: Reason.NOT_IMPLEMENTED,
    Status.NON_FINITE_LOGITS: Reason.NON_FINITE_LOGITS,
    Status.DEVICE: Reason.DEVICE_FAULT,
    Status.ENGINE_FAILED: Reason.ENGINE_FAILED,
    Status.DRAINING: Reason.DRAINING,
    Status.IO: Reason.MODEL_NOT_FOUND,
    Status.INTERNAL: Reason.INTERNAL,
}

# The core's names of fields, as the contract spells them.
_FIELD_PATHS = {
    "token_ids": "spec.token_ids.ids",
    "prompt": "spec.token_ids.ids",
    "temperature": "spec.sampling.temperature",
    "top_k": "spec.sampling.top_k",
    "top_p": "spec.sampling.top_p",
    "min_p": "spec.sampling.min_p",
    "repetition_penalty": "spec.sampling.repetition_penalty",
    "frequency_penalty": "spec.sampling.frequency_penalty",
    "presence_penalty": "spec.sampling.presence_penalty",
    "logit_bias": "spec.sampling.logit_bias",
    "logit_biases": "spec.sampling.logit_bias",
    "max_tokens": "spec.limits.max_tokens",
    "min_tokens": "spec.stop.min_tokens",
    "stop_strings": "spec.stop.strings",
    "stop_token_ids": "spec.stop.token_ids",
    "num_logprobs": "spec.output.top_logprobs",
    "priority": "spec.priority",
}
_METADATA_NAMES = {
    "num_tokens": "num_prompt_tokens",
    "blocks_needed": "num_blocks_needed",
    "blocks_total": "num_blocks_total",
}


def to_service_error(error: XllmError) -> ServiceError:
    """Return an error of the core as one of ours; the one place where the two meet."""
    return _service_error(error.status, error.message, error.details)


def _service_error(status: Status, message: str, details: Mapping[str, str]) -> ServiceError:
    names = {**_METADATA_NAMES, "limit": "queue_limit" if status == Status.QUEUE_FULL else "max_seq_len"}
    metadata = {names.get(key, key): value for key, value in details.items() if key not in ("field", "index")}
    path = ""
    if name := details.get("field"):
        base, bracket, rest = name.partition("[")
        path = _FIELD_PATHS.get(base, base) + bracket + rest
        if "index" in details and not bracket:
            path += f"[{details['index']}]"
    return ServiceError(_REASONS.get(status, Reason.INTERNAL), message, metadata=metadata, field=path)


# ---------------------------------------------------------------- model


class Model:
    """An opened model file with its tokenizer and chat template; loads no weights. Close it, or use it in `with`.

    Every method raises ServiceError. None of them waits for a device; those that read text take time linear in it.
    """

    def __init__(self, core: Any) -> None:
        """Take over an opened cyengine.Model."""
        self.core = core
        self.info: ModelInfo = core.info
        self.digest = FileDigest(shard_paths(Path(self.info.path)))
        self._pieces: list[bytes] = []
        self._control: frozenset[int] = frozenset()
        if self.info.has_tokenizer:
            self._read_vocabulary()
        self.chat_template = ChatTemplate(
            self.info.chat_template, [self.piece(i).decode("utf-8", "replace") for i in self._control], self._names()
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file; engines made from it go on."""
        self.digest.stop()
        self.chat_template.close()
        self.core.close()

    def _read_vocabulary(self) -> None:
        control = []
        for token_id in range(self.info.vocab_size):
            piece, token_type = self.core.token_piece(token_id)
            self._pieces.append(piece)
            if token_type == _CONTROL:
                control.append(token_id)
        self._control = frozenset(control)

    def _names(self) -> dict[str, str]:
        """What a template may call the special tokens: bos_token, eos_token, ..."""
        names = {}
        for entry in self.metadata():
            match = re.fullmatch(r"tokenizer\.ggml\.(bos|eos|unknown|padding)_token_id", entry.key)
            if match is None or not self._pieces:
                continue
            token_id = json.loads(entry.value_json)
            if isinstance(token_id, int) and 0 <= token_id < len(self._pieces):
                short = {"unknown": "unk", "padding": "pad"}.get(match[1], match[1])
                names[f"{short}_token"] = self.piece(token_id).decode("utf-8", "replace")
        return names

    def metadata(self) -> list[Metadata]:
        """Every key of the file, in its order."""
        entries: list[Metadata] = self.core.metadata()
        return entries

    def tensors(self) -> list[TensorInfo]:
        """Every tensor of the file, in its order."""
        tensors: list[TensorInfo] = self.core.tensors()
        return tensors

    def facts(self) -> list[Fact]:
        """What was inferred while reading the file, with its source."""
        found: list[Fact] = self.core.facts()
        return found

    def end_tokens(self) -> list[EndToken]:
        """The end-of-generation set, with the source of each member."""
        tokens: list[EndToken] = self.core.end_tokens()
        return tokens

    def plan(self, config: ServeConfig | None = None) -> Plan:
        """What an engine would take on this machine, before anything is loaded."""
        with _translated():
            plan: Plan = self.core.plan(engine_config(config) if config is not None else None)
            return plan

    def check_tokenizer(self) -> None:
        """Raise NO_TOKENIZER where text cannot be read with this model."""
        if self.info.has_tokenizer:
            return
        has_vocabulary = self.info.tokenizer_model not in ("", "no_vocab")
        metadata = {"key": "tokenizer.ggml.pre" if has_vocabulary else "tokenizer.ggml.model"}
        if has_vocabulary:
            metadata["flag"] = "--pretokenizer"
        message = "the model file has no usable tokenizer: send token ids"
        try:
            self.encode("")  # the core knows what is missing
        except ServiceError as error:
            message = error.message
        raise ServiceError(Reason.NO_TOKENIZER, message, metadata=metadata)

    def is_control(self, token_id: int) -> bool:
        """The id is a CONTROL token, which gives no text."""
        return token_id in self._control

    def piece(self, token_id: int) -> bytes:
        """The raw bytes of one token; for a CONTROL token its name. Empty for an id outside the vocabulary."""
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the ids of a text; written control tokens become those tokens only with parse_special."""
        with _translated():
            ids: list[int] = self.core.encode(text, add_special=add_special, parse_special=parse_special)
            return ids

    def decode(self, ids: Sequence[int], *, render_special: bool = False) -> str:
        """Return the text of ids; bytes that form no code point become U+FFFD."""
        with _translated():
            text: str = self.core.decode(ids, render_special=render_special)
            return text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] = (),
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> list[Piece]:
        """Return the prompt of a conversation in pieces; `encode_pieces` makes ids of them.

        Raises NO_CHAT_TEMPLATE where the model has none that works, TEMPLATE_REFUSED where it refuses the messages.
        """
        try:
            return self.chat_template.render(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, arguments=arguments
            )
        except TemplateUnusableError as error:
            raise ServiceError(Reason.NO_CHAT_TEMPLATE, str(error)) from None
        except TemplateRenderError as error:
            raise ServiceError(Reason.TEMPLATE_REFUSED, str(error), field="chat.messages") from None

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[int]:
        """Return the ids of a rendered conversation; only text of the template may spell control tokens."""
        # note: as in transformers nothing is added around it: a template writes its own BOS where the model wants one.
        with _translated():
            texts = [TextPiece(piece.text, piece.trusted) for piece in pieces]
            ids: list[int] = self.core.encode(texts, add_special=False)
            return ids


def open_model(path: str | os.PathLike[str], *, pretokenizer: str | None = None) -> Model:
    """Map a GGUF file and read everything but its weights.

    Raises ServiceError: MODEL_NOT_FOUND, INVALID_MODEL, TRUNCATED_MODEL, UNSUPPORTED_MODEL, with the key or tensor and
    the byte offset in its message.
    """
    with _translated():
        core = cyengine.Model(path, pretokenizer=pretokenizer)
        try:
            return Model(core)
        except BaseException:
            core.close()
            raise


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except XllmError as error:
        raise to_service_error(error) from error


# ---------------------------------------------------------------- engine


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

    def cancel(self, request_id: int) -> None:
        """End a request."""

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

    def submit_prefill(self, slot: Slot, token_ids: Sequence[int], *, max_duration_s: float = 0.0) -> int:
        """Begin to compute a prompt into a slot."""

    def submit_decode_slot(self, slot: Slot, request: Request) -> int:
        """Begin to generate in a per-slot slot."""

    def submit_decode_batch(self, entries: Sequence[tuple[Slot, Request]]) -> list[int]:
        """Begin to generate in batched slots, in lock-step."""

    def close(self) -> None:
        """Stop and free everything."""


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
        memory_limit=config.memory_limit,
        instruction_set=config.instruction_set,
        log_fd=log_fd,
    )


def create_core(model: Model, config: ServeConfig, *, log_fd: int | None = None) -> CoreEngine:
    """Load the weights and start the step loop; waits for both. Raises ServiceError, MEMORY with its Plan."""
    options = engine_config(config, log_fd=log_fd)
    try:
        engine: CoreEngine = cyengine.Engine(model.core, options)
        return engine
    except XllmError as error:
        failure = to_service_error(error)
        if failure.reason is Reason.MEMORY:
            with contextlib.suppress(XllmError):
                plan = convert.plan_message(model.core.plan(options), convert.plan_context(options))
                plan.fits, plan.remedy = False, failure.metadata.get("remedy", plan.remedy)
                failure.extra.append(plan)
        raise failure from error


class LocalEngine:
    """An engine of this process, for code without an event loop. Close it, or use it in `with`."""

    def __init__(self, model: Model, core: Any) -> None:
        """Take over a started cyengine.Engine."""
        self.model = model
        self.core = core
        self.info: EngineInfo = core.info

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine; its model stays open."""
        self.core.close()

    def stats(self) -> EngineStats:
        """A snapshot."""
        stats: EngineStats = self.core.stats()
        return stats

    def submit(self, prompt: Sequence[int], *, max_tokens: int, ignore_eos: bool = False) -> int:
        """Queue a greedy request and return its id; its events come out of `take_events`. Raises ServiceError."""
        with _translated():
            request_id: int = self.core.submit(Request(prompt=prompt, max_tokens=max_tokens, ignore_eos=ignore_eos))
            return request_id

    def take_events(self, timeout_s: float) -> list[Event]:
        """Take what has happened to submitted requests; waits so long while there is nothing. Raises ServiceError."""
        with _translated():
            events: list[Event] = self.core.take_events(timeout_s=timeout_s)
            return events

    def cancel(self, request_id: int) -> None:
        """End a submitted request; its FinishedEvent says CANCELLED. Harmless for one that has ended."""
        with _translated():
            self.core.cancel(request_id)

    def stream(self, prompt: Sequence[int], **options: Any) -> Iterator[Event]:
        """Generate from token ids and yield AcceptedEvent, TokenEvents and, last, FinishedEvent.

        Closing the iterator cancels the request. Options are the keywords of cyengine.Engine.generate: temperature,
        top_k, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty, seed, max_tokens, min_tokens,
        ignore_eos, num_logprobs, stop_strings, stop_token_ids, logit_bias, decode_mode, priority, max_queue_s,
        max_duration_s. Raises ServiceError, also when the generation fails later.
        """
        with _translated():
            events = self.core.generate(list(prompt), **options)
            try:
                for event in events:
                    yield event
                    if isinstance(event, FinishedEvent) and event.status is not Status.OK:
                        raise _service_error(event.status, event.message, {})
            finally:
                events.close()


def open_engine(model: Model, config: ServeConfig, *, log_fd: int | None = None) -> LocalEngine:
    """Load a model's weights into an engine of this process. Raises ServiceError.

    `log_fd` gets one line per notice; None: silent.
    """
    return LocalEngine(model, create_core(model, config, log_fd=log_fd))


# ---------------------------------------------------------------- streams


@dataclass(slots=True)
class Progress:
    """What has happened to one request since the last look. With a fast reader, one token; with a slow one, many.

    Attributes:
        index: which of the requests of one call, from 0.
    """

    index: int = 0
    accepted: AcceptedEvent | None = None
    prefill: PrefillEvent | None = None
    tokens: list[TokenEvent] = field(default_factory=list)
    finished: FinishedEvent | None = None


class _Stream:
    """Events of one call's requests on their way to its reader: coalesced, never lost, never more than a bound."""

    def __init__(self, request_ids: Sequence[int], on_stall: Callable[[], None] | None) -> None:
        self.waits_since: float | None = None  # when something began to wait for the reader
        self.failure: ServiceError | None = None
        self.on_stall = on_stall
        self._indices = {request_id: index for index, request_id in enumerate(request_ids)}
        self._pending: dict[int, Progress] = {}
        self._reader: asyncio.Future[None] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that wait for the reader."""
        return sum(len(progress.tokens) for progress in self._pending.values())

    def put(self, event: Event) -> None:
        if self.waits_since is None:
            self.waits_since = time.monotonic()
        index = self._indices[event.request_id]
        progress = self._pending.get(index)
        if progress is None:
            progress = self._pending[index] = Progress(index)
        if isinstance(event, TokenEvent):
            progress.tokens.append(event)
        elif isinstance(event, FinishedEvent):
            progress.finished = event
        elif isinstance(event, PrefillEvent):
            progress.prefill = event
        else:
            progress.accepted = event
        self._wake()

    def fail(self, failure: ServiceError) -> None:
        """End it; what is already there can still be read."""
        if self.failure is None:
            self.failure = failure
        self._wake()

    async def take(self) -> list[Progress]:
        """Wait for something and take all of it; raises the failure when there is nothing left."""
        while self.waits_since is None:
            if self.failure is not None:
                raise self.failure
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        taken, self._pending, self.waits_since = self._pending, {}, None
        return [taken[index] for index in sorted(taken)]

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


@dataclass(frozen=True, slots=True)
class Bounds:
    """When a call must be over, in seconds from its submission; None: no bound.

    Attributes:
        deadline_s: the call's own deadline: reached, it fails.
        duration_s: the longest time that was asked for: reached after it began, an ordinary end.
    """

    deadline_s: float | None = None
    duration_s: float | None = None

    @classmethod
    def of(cls, choices: DecodeChoices, deadline_s: float | None, elapsed_s: float) -> Bounds:
        """Return the bounds of a call that came `elapsed_s` ago and has `deadline_s` left."""
        longest = choices.max_duration_s
        return cls(deadline_s, None if longest is None else longest - elapsed_s)

    def after(self, elapsed_s: float) -> Bounds:
        """Return what is left of them."""
        deadline_s, duration_s = self.deadline_s, self.duration_s
        return Bounds(
            None if deadline_s is None else deadline_s - elapsed_s,
            None if duration_s is None else max(duration_s - elapsed_s, 1e-6),  # an end, not a refusal, by now
        )

    @property
    def seconds(self) -> float:
        """The tighter one, as the core takes it. Raises DEADLINE_EXCEEDED when it has passed."""
        bounds = [bound for bound in (self.deadline_s, self.duration_s) if bound is not None]
        if not bounds:
            return 0.0
        if min(bounds) <= 0:
            raise ServiceError(Reason.DEADLINE_EXCEEDED, "the time allowed was over before anything could begin")
        return min(bounds)

    def is_duration(self, finished: FinishedEvent) -> bool:
        """Whether it ended because of its own longest time, not by the call's deadline."""
        return (
            finished.status is Status.DEADLINE_EXCEEDED
            and self.duration_s is not None
            and (self.deadline_s is None or self.duration_s <= self.deadline_s)
        )


class AsyncEngine:
    """An engine behind an event loop. Make it on the loop, and `await close()` it there.

    Args:
        core: a started engine; closed with this object.
        model: what the engine runs; not closed.
        stuck_after_s: a heartbeat older than this means that the step loop is stuck.
        stall_allowance_s: how long a client may not read before its request ends with CLIENT_STALLED.
    """

    def __init__(
        self, core: CoreEngine, model: Model, *, stuck_after_s: float = 30.0, stall_allowance_s: float = 30.0
    ) -> None:
        self.model = model
        self.info: EngineInfo = core.info
        self._core = core
        self._stuck_after_s = stuck_after_s
        self._stall_allowance_s = stall_allowance_s
        self._streams: dict[int, _Stream] = {}
        # Weight sets in memory: that of the engine's mode; with AUTO each one from its first use on.
        self.loaded_modes = {self.info.decode_mode} - {DecodeMode.AUTO}
        self._step_times: deque[float] = deque(maxlen=_NUM_STEP_SAMPLES)
        self._num_steps_seen = 0
        self._is_closed = False
        # Told seconds from a cancel to its slot and blocks being free, and how many requests one wake-up had tokens of.
        self.on_freed: Callable[[float], object] = lambda _: None
        self.on_batch: Callable[[int], object] = lambda _: None
        self._cancelled_at: dict[int, float] = {}
        self._loop = asyncio.get_running_loop()
        self._fd = core.event_fd
        self._loop.add_reader(self._fd, self._dispatch)
        self._watcher = self._loop.create_task(self._watch(), name="xllm-engine-watch")

    @property
    def is_closed(self) -> bool:
        """It gives everything back, or has."""
        return self._is_closed

    @property
    def num_streams(self) -> int:
        """Requests whose events somebody waits for."""
        return len(self._streams)

    def stats(self) -> EngineStats:
        """A snapshot; never waits for the step loop."""
        return self._core.stats()

    def slots(self) -> list[SlotInfo]:
        """A snapshot of every slot; never waits for the step loop."""
        return self._core.slots()

    @property
    def step_time_s(self) -> float | None:
        """Median duration of steps of the last seconds of work; None before there was any."""
        return statistics.median(self._step_times) if self._step_times else None

    def problem(self) -> str:
        """Why the engine cannot serve, by its own heartbeat; empty while it can."""
        if self._is_closed:
            return "the engine is closed"
        stats = self._core.stats()
        if stats.has_failed:
            return "the engine has stopped after a fault; restart the server"
        if stats.heartbeat_age_s > self._stuck_after_s:
            return f"the engine's step loop has not moved for {stats.heartbeat_age_s:.0f} s"
        return ""

    def drain(self) -> None:
        """Refuse new requests; those that are in go on."""
        if not self._is_closed:
            self._core.drain()

    def resolve_mode(self, requested: int, call: str) -> DecodeMode:
        """Return the mode that a request gets, by the table of DecodeMode. Raises DECODE_MODE_MISMATCH."""
        own, wanted = self.info.decode_mode, DecodeMode(requested)
        if own is DecodeMode.AUTO:
            return wanted or DecodeMode.BATCHED
        if wanted in (DecodeMode.AUTO, own):
            return own
        raise _mode_mismatch(own, wanted, call)

    async def generate(
        self,
        prompt: Sequence[int],
        choices: DecodeChoices,
        bounds: Bounds | None = None,
        *,
        on_stall: Callable[[], None] | None = None,
    ) -> AsyncGenerator[Progress, None]:
        """Run one request and yield what happens to it; the last item has `finished`.

        Closing the iterator cancels the request, and its slot and blocks are free within one step.

        Args:
            prompt: token ids.
            choices: how to generate.
            bounds: when it must be over; work that is late is not begun.
            on_stall: called, besides the failure, when the client has not read for too long.

        Raises:
            ServiceError: refused before the first item; later, with the usage so far, when the generation fails.
        """
        bounds = bounds or Bounds()
        request = _core_request(choices, bounds, prompt)
        async with aclosing(self._follow(lambda: [self._core.submit(request)], on_stall)) as batches:
            async for progress in _one(batches, bounds):
                yield progress

    # ---- slots

    def slot(self, index: int) -> SlotInfo | None:
        """A snapshot of one slot; None where there is no such slot."""
        try:
            return self._core.slot(index)
        except XllmError:
            return None

    def acquire(self, mode: int, lease_s: float, index: int | None) -> Slot:
        """Own a free slot. Raises DECODE_MODE_MISMATCH, NO_FREE_SLOT, SLOT_NOT_FOUND, MEMORY, DRAINING."""
        with self._refusals():
            return self._core.acquire(DecodeMode(mode), lease_s=lease_s, slot=index)

    def renew(self, slot: Slot, lease_s: float) -> SlotInfo:
        """Start the lease anew. Raises STALE_EPOCH, LEASE_LOST."""
        with self._refusals():
            return self._core.renew(slot, lease_s)

    def release(self, slot: Slot) -> SlotInfo:
        """End an ownership; what runs in the slot ends with LEASE_LOST. Raises STALE_EPOCH, LEASE_LOST."""
        with self._refusals():
            return self._core.release(slot)

    async def prefill(
        self,
        slot: Slot,
        prompt: Sequence[int],
        bounds: Bounds,
        *,
        on_stall: Callable[[], None] | None = None,
    ) -> AsyncGenerator[Progress, None]:
        """Compute a prompt into a slot, or append it; closing the iterator leaves the slot as it was.

        Raises ServiceError.
        """
        longest = bounds.seconds

        def submit() -> list[int]:
            return [self._core.submit_prefill(slot, prompt, max_duration_s=longest)]

        async with aclosing(self._follow(submit, on_stall)) as batches:
            async for progress in _one(batches, bounds):
                yield progress

    async def decode_slot(
        self,
        slot: Slot,
        choices: DecodeChoices,
        bounds: Bounds,
        *,
        on_stall: Callable[[], None] | None = None,
    ) -> AsyncGenerator[Progress, None]:
        """Per-slot API: generate in one slot. Closing the iterator leaves it READY. Raises ServiceError."""
        request = _core_request(choices, bounds)
        async with aclosing(self._follow(lambda: [self._core.submit_decode_slot(slot, request)], on_stall)) as batches:
            async for progress in _one(batches, bounds):
                yield progress

    async def generate_in(
        self,
        slot: Slot,
        prompt: Sequence[int],
        choices: DecodeChoices,
        bounds: Bounds,
        *,
        on_stall: Callable[[], None] | None = None,
    ) -> AsyncGenerator[Progress, None]:
        """Append a prompt to a slot that is owned and generate in it: `generate`, with a slot that stays owned.

        The last item's figures are of both parts. Closing the iterator leaves the slot READY, or as it was before when
        its prompt was not computed yet. Raises ServiceError.
        """
        began = time.monotonic()
        prefilled: FinishedEvent | None = None
        async with aclosing(self.prefill(slot, prompt, bounds, on_stall=on_stall)) as filling:
            async for progress in filling:
                finished = progress.finished
                if finished is not None and finished.status is Status.OK:
                    prefilled, progress.finished = finished, None
                yield progress
        if prefilled is None:
            return  # its longest time was over
        rest = bounds.after(time.monotonic() - began)
        if slot.decode_mode is DecodeMode.PER_SLOT:
            decoding = self.decode_slot(slot, choices, rest, on_stall=on_stall)
        else:
            decoding = self._decode_one(slot, choices, rest, on_stall)
        async with aclosing(decoding):
            async for progress in decoding:
                progress.accepted = None  # the prefill's came before
                if progress.finished is not None:
                    progress.finished.num_prompt_tokens = prefilled.num_prompt_tokens
                    progress.finished.num_cached_tokens = prefilled.num_cached_tokens
                    progress.finished.prefill_s += prefilled.prefill_s
                yield progress

    async def _decode_one(
        self, slot: Slot, choices: DecodeChoices, bounds: Bounds, on_stall: Callable[[], None] | None
    ) -> AsyncGenerator[Progress, None]:
        """A batch of one."""
        async with aclosing(self.decode_batch([(slot, choices, bounds)], on_stall=on_stall)) as batches:
            async for (progress,) in batches:
                yield progress

    async def decode_batch(
        self,
        entries: Sequence[tuple[Slot, DecodeChoices, Bounds]],
        *,
        on_stall: Callable[[], None] | None = None,
    ) -> AsyncGenerator[list[Progress], None]:
        """Batched API: generate in several slots in lock-step; yields what happened to each.

        An entry whose slot was released or lost its lease ends with that status in its `finished`; the others go on.
        Closing the iterator leaves the slots READY. Raises ServiceError: refused as a whole; later, when an entry fails
        in another way, or every one has lost its slot.
        """
        requests = [(slot, _core_request(choices, bounds)) for slot, choices, bounds in entries]
        num_lost, accepted = 0, set[int]()
        async with aclosing(self._follow(lambda: self._core.submit_decode_batch(requests), on_stall)) as batches:
            async for batch in batches:
                failure: ServiceError | None = None
                for progress in batch:
                    if progress.accepted is not None:
                        accepted.add(progress.index)
                    finished = progress.finished
                    if finished is None or finished.status is Status.OK:
                        continue
                    was_accepted = progress.index in accepted
                    if was_accepted and entries[progress.index][2].is_duration(finished):
                        continue
                    num_lost += finished.status is Status.LEASE_LOST
                    if finished.status is not Status.LEASE_LOST or num_lost == len(entries) or not was_accepted:
                        failure = _failure_of(finished, was_accepted)
                        progress.finished = None
                yield batch
                if failure is not None:
                    raise failure

    async def _follow(
        self, submit: Callable[[], list[int]], on_stall: Callable[[], None] | None
    ) -> AsyncGenerator[list[Progress], None]:
        """Submit requests and yield what happens to them until each has finished; closing it cancels the rest."""
        if problem := self.problem():
            raise ServiceError(Reason.ENGINE_FAILED, problem)
        with self._refusals():
            request_ids = submit()
        stream = _Stream(request_ids, on_stall)
        running = set(request_ids)
        self._streams.update(dict.fromkeys(request_ids, stream))
        try:
            while running:
                batch = await stream.take()
                running -= {request_ids[progress.index] for progress in batch if progress.finished is not None}
                yield batch
        finally:
            for request_id in request_ids:
                self._streams.pop(request_id, None)
            for request_id in running:
                # The one release path: a slot comes back here, whoever ended the call and however.
                if not self._is_closed:
                    with contextlib.suppress(XllmError):
                        self._core.cancel(request_id)
                        self._cancelled_at[request_id] = time.monotonic()

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """Say in our words why the core takes something not."""
        try:
            yield
        except XllmError as error:
            failure = to_service_error(error)
            if failure.reason is Reason.PROMPT_TOO_LONG:  # the core tells how long the prompt may be
                failure.metadata["max_seq_len"] = str(self.info.max_seq_len)
            elif failure.reason is Reason.MEMORY:
                plan = convert.plan_message(self.info.plan, convert.plan_context(self.info))
                plan.fits, plan.remedy = False, failure.metadata.get("remedy", "")
                failure.extra.append(plan)
            raise failure from error

    async def close(self) -> None:
        """End what runs and free everything; waits for at most one step. Calling it again is harmless."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._fd)
        self._watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watcher
        self._fail_all(ServiceError(Reason.DRAINING, "the server stops"))
        await asyncio.to_thread(self._core.close)

    def _dispatch(self) -> None:
        """Hand out what one step, or several, have brought."""
        try:
            events = self._core.take_events()
        except XllmError as error:
            # The descriptor stays readable from now on: there is nothing more to read.
            self._loop.remove_reader(self._fd)
            self._fail_all(to_service_error(error))
            return
        if num_decoding := len({event.request_id for event in events if isinstance(event, TokenEvent)}):
            self.on_batch(num_decoding)
        for event in events:
            if isinstance(event, FinishedEvent) and (cancelled := self._cancelled_at.pop(event.request_id, None)):
                self.on_freed(time.monotonic() - cancelled)
            if isinstance(event, AcceptedEvent):
                self.loaded_modes.add(event.decode_mode)
            stream = self._streams.get(event.request_id)
            if stream is not None:  # else it was cancelled, and nobody waits
                stream.put(event)

    def _fail_all(self, failure: ServiceError) -> None:
        for stream in set(self._streams.values()):
            stream.fail(failure)

    async def _watch(self) -> None:
        """Look after clients that do not read and a step loop that does not move, and at how long steps take."""
        while True:
            await asyncio.sleep(min(_WATCH_S, self._stall_allowance_s / 4))
            stats = self._core.stats()
            if stats.num_steps != self._num_steps_seen:
                self._num_steps_seen = stats.num_steps
                self._step_times.append(stats.last_step_s)
            if self._streams and (problem := self.problem()):
                _log.error("%s", problem)
                self._fail_all(ServiceError(Reason.ENGINE_FAILED, problem))
            now = time.monotonic()
            for stream in set(self._streams.values()):
                if stream.waits_since is None:
                    continue
                is_late = now - stream.waits_since > self._stall_allowance_s
                if is_late or stream.num_tokens > _MAX_BUFFERED_TOKENS:
                    stream.fail(
                        ServiceError(Reason.CLIENT_STALLED, "the client did not read its stream for too long; read on")
                    )
                    if stream.on_stall is not None:
                        stream.on_stall()


async def _one(batches: AsyncGenerator[list[Progress], None], bounds: Bounds) -> AsyncGenerator[Progress, None]:
    """Yield what happens to the only request of a call; raises what it fails with, after what came before."""
    was_accepted = False
    async for (progress,) in batches:
        was_accepted = was_accepted or progress.accepted is not None
        finished = progress.finished
        if finished is None or finished.status is Status.OK or (was_accepted and bounds.is_duration(finished)):
            yield progress
            continue
        if progress.accepted is not None or progress.tokens:
            progress.finished = None
            yield progress
        raise _failure_of(finished, was_accepted)


def _mode_mismatch(own: DecodeMode, wanted: DecodeMode, call: str) -> ServiceError:
    """Return the refusal of a call that contradicts the engine's mode, in the core's own words."""
    remedy = f"request {own.name} or AUTO, or create an engine in mode {wanted.name} or AUTO"
    return ServiceError(
        Reason.DECODE_MODE_MISMATCH,
        f"{call}: the engine decodes {own.name}, the call asks for {wanted.name}; {remedy}",
        metadata={"engine_mode": own.name, "requested_mode": wanted.name, "call": call, "remedy": remedy},
    )


def _core_request(choices: DecodeChoices, bounds: Bounds, prompt: Sequence[int] = ()) -> Request:
    return Request(
        prompt=prompt,
        sampling=SamplingParams(
            temperature=choices.temperature,
            top_k=choices.top_k,
            top_p=choices.top_p,
            min_p=choices.min_p,
            repetition_penalty=choices.repetition_penalty,
            frequency_penalty=choices.frequency_penalty,
            presence_penalty=choices.presence_penalty,
            seed=choices.seed,
        ),
        max_tokens=choices.max_tokens or 0,
        min_tokens=choices.min_tokens,
        ignore_eos=choices.ignore_eos,
        num_logprobs=choices.top_logprobs,
        stop_strings=choices.stop_strings,
        stop_token_ids=choices.stop_token_ids,
        logit_bias=choices.logit_bias,
        decode_mode=DecodeMode(choices.decode_mode),
        priority=choices.priority,
        max_queue_s=choices.max_queue_s or 0.0,
        max_duration_s=bounds.seconds,
    )


def _failure_of(finished: FinishedEvent, was_accepted: bool) -> ServiceError:
    failure = _service_error(finished.status, finished.message, {})
    if was_accepted:
        failure.extra.append(
            convert.usage_message(finished.num_prompt_tokens, finished.num_cached_tokens, finished.num_generated_tokens)
        )
    return failure
