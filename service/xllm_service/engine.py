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
    SlotInfo,
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
from xllm_service.validation import ValidRequest

__all__ = [
    "AcceptedEvent",
    "AsyncEngine",
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
    "limit": "max_seq_len",
    "blocks_needed": "num_blocks_needed",
    "blocks_total": "num_blocks_total",
}


def to_service_error(error: XllmError) -> ServiceError:
    """Return an error of the core as one of ours; the one place where the two meet."""
    return _service_error(error.status, error.message, error.details)


def _service_error(status: Status, message: str, details: Mapping[str, str]) -> ServiceError:
    metadata = {_METADATA_NAMES.get(key, key): value for key, value in details.items() if key not in ("field", "index")}
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
                failure.extra.append(convert.plan_message(model.core.plan(options), convert.plan_context(options)))
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
    """What has happened to one request since the last look. With a fast reader, one token; with a slow one, many."""

    accepted: AcceptedEvent | None = None
    prefill: PrefillEvent | None = None
    tokens: list[TokenEvent] = field(default_factory=list)
    finished: FinishedEvent | None = None


class _Stream:
    """Events of one request on their way to its reader: coalesced, never lost, never more than a bound."""

    def __init__(self) -> None:
        self.pending = Progress()
        self.waits_since: float | None = None  # when something began to wait for the reader
        self.failure: ServiceError | None = None
        self.on_stall: Callable[[], None] | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        if self.waits_since is None:
            self.waits_since = time.monotonic()
        if isinstance(event, TokenEvent):
            self.pending.tokens.append(event)
        elif isinstance(event, FinishedEvent):
            self.pending.finished = event
        elif isinstance(event, PrefillEvent):
            self.pending.prefill = event
        else:
            self.pending.accepted = event
        self._wake()

    def fail(self, failure: ServiceError) -> None:
        """End it; what is already there can still be read."""
        if self.failure is None:
            self.failure = failure
        self._wake()

    async def take(self) -> Progress:
        """Wait for something and take all of it; raises the failure when there is nothing left."""
        while self.waits_since is None:
            if self.failure is not None:
                raise self.failure
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        taken, self.pending, self.waits_since = self.pending, Progress(), None
        return taken

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


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
        self._loop = asyncio.get_running_loop()
        self._fd = core.event_fd
        self._loop.add_reader(self._fd, self._dispatch)
        self._watcher = self._loop.create_task(self._watch(), name="xllm-engine-watch")

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

    async def generate(
        self,
        prompt: Sequence[int],
        request: ValidRequest,
        *,
        deadline_s: float | None = None,
        on_stall: Callable[[], None] | None = None,
    ) -> AsyncGenerator[Progress, None]:
        """Run one request and yield what happens to it; the last item has `finished`.

        Closing the iterator cancels the request, and its slot and blocks are free within one step.

        Args:
            prompt: token ids.
            request: what was asked for.
            deadline_s: seconds until the call's own deadline; work that is late is not begun.
            on_stall: called, besides the failure, when the client has not read for too long.

        Raises:
            ServiceError: refused before the first item; later, with the usage so far, when the generation fails.
        """
        if problem := self.problem():
            raise ServiceError(Reason.ENGINE_FAILED, problem)
        try:
            request_id = self._core.submit(_core_request(prompt, request, deadline_s))
        except XllmError as error:
            failure = to_service_error(error)
            if failure.reason is Reason.PROMPT_TOO_LONG:  # the core tells how long the prompt may be
                failure.metadata["max_seq_len"] = str(self.info.max_seq_len)
            raise failure from error
        stream = self._streams[request_id] = _Stream()
        stream.on_stall = on_stall
        is_over = False
        was_accepted = False
        try:
            while not is_over:
                progress = await stream.take()
                was_accepted = was_accepted or progress.accepted is not None
                finished = progress.finished
                is_over = finished is not None
                if finished is None or finished.status is Status.OK or _ran_full_time(finished, request, was_accepted):
                    yield progress
                    continue
                if progress.accepted is not None or progress.tokens:
                    progress.finished = None
                    yield progress
                raise _failure_of(finished, was_accepted)
        finally:
            self._streams.pop(request_id, None)
            if not is_over and not self._is_closed:
                # The one release path: a slot comes back here, whoever ended the call and however.
                with contextlib.suppress(XllmError):
                    self._core.cancel(request_id)

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
        for event in events:
            if isinstance(event, AcceptedEvent):
                self.loaded_modes.add(event.decode_mode)
            stream = self._streams.get(event.request_id)
            if stream is not None:  # else it was cancelled, and nobody waits
                stream.put(event)

    def _fail_all(self, failure: ServiceError) -> None:
        for stream in self._streams.values():
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
            for stream in list(self._streams.values()):
                if stream.waits_since is None:
                    continue
                is_late = now - stream.waits_since > self._stall_allowance_s
                if is_late or len(stream.pending.tokens) > _MAX_BUFFERED_TOKENS:
                    stream.fail(
                        ServiceError(Reason.CLIENT_STALLED, "the client did not read its stream for too long; read on")
                    )
                    if stream.on_stall is not None:
                        stream.on_stall()


def _core_request(prompt: Sequence[int], request: ValidRequest, deadline_s: float | None) -> Request:
    bounds = [bound for bound in (request.max_duration_s, deadline_s) if bound is not None]
    return Request(
        prompt=prompt,
        sampling=SamplingParams(
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            repetition_penalty=request.repetition_penalty,
            frequency_penalty=request.frequency_penalty,
            presence_penalty=request.presence_penalty,
            seed=request.seed,
        ),
        max_tokens=request.max_tokens or 0,
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        num_logprobs=request.top_logprobs,
        stop_strings=request.stop_strings,
        stop_token_ids=request.stop_token_ids,
        logit_bias=request.logit_bias,
        decode_mode=DecodeMode(request.decode_mode),
        priority=request.priority,
        max_queue_s=request.max_queue_s or 0.0,
        # A deadline that has passed must not turn into "no bound", which is what 0 means to the core.
        max_duration_s=max(min(bounds), 1e-6) if bounds else 0.0,
    )


def _ran_full_time(finished: FinishedEvent, request: ValidRequest, was_accepted: bool) -> bool:
    """Whether it ended because of its own max_duration, which is an ordinary end once it was accepted."""
    return finished.status is Status.DEADLINE_EXCEEDED and was_accepted and request.max_duration_s is not None


def _failure_of(finished: FinishedEvent, was_accepted: bool) -> ServiceError:
    failure = _service_error(finished.status, finished.message, {})
    if was_accepted:
        failure.extra.append(
            convert.usage_message(finished.num_prompt_tokens, finished.num_cached_tokens, finished.num_generated_tokens)
        )
    return failure
