"""An engine and a model file without a model, for tests of the service: tokens are bytes, and tests say what happens.

FakeEngine has the surface of cyengine.Engine that the service uses. Nothing happens by itself: a test calls `accept`,
`prefill`, `token` and `finish`, or sets `answer`, and then each request is answered as soon as it comes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cyengine.errors import (
    EngineFailedError,
    InvalidArgumentError,
    PromptTooLongError,
    QueueFullError,
    UnimplementedError,
)
from cyengine.types import (
    AcceptedEvent,
    Candidate,
    DecodeMode,
    EndToken,
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
    Slot,
    SlotInfo,
    Status,
    TensorInfo,
    TextPiece,
    TokenEvent,
    TokenMask,
)

CONTROL = ("<|end|>", "<|user|>", "<|assistant|>")
END = 0
FIRST_BYTE = len(CONTROL)
VOCAB_SIZE = FIRST_BYTE + 256
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PLAN = Plan(1000, 0, 5000, 64, 65536, 64, 100, 10, 66646, 1 << 30, 1 << 29, 16, True)


def ids_of(text: str) -> list[int]:
    return [FIRST_BYTE + byte for byte in text.encode()]


class FakeModel:
    """A model file whose tokens are three control tokens and the 256 bytes."""

    def __init__(self, path: Path, **info: Any) -> None:
        self.info = replace(
            ModelInfo(
                architecture="fake", name="Fake", path=str(path), file_bytes=5000, num_params=1000, has_weights=True,
                num_layers=1, hidden_size=8, intermediate_size=16, num_heads=2, num_kv_heads=1, head_dim=4,
                vocab_size=VOCAB_SIZE, num_real_tokens=VOCAB_SIZE, context_length=256, tokenizer_model="gpt2",
                pretokenizer="bytes", has_tokenizer=True, bos_token_id=None, add_bos=False, chat_template=TEMPLATE,
            ),
            **info,
        )  # fmt: skip
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True

    def metadata(self) -> list[Metadata]:
        return [Metadata("general.architecture", "string", '"fake"'), Metadata("fake.rope.freq_base", "float32", "5e5")]

    def tensors(self) -> list[TensorInfo]:
        return [TensorInfo("token_embd.weight", "q4_1", (8, VOCAB_SIZE), 4000, 0)]

    def facts(self) -> list[Fact]:
        return [Fact("pretokenizer", "bytes", "a test")]

    def end_tokens(self) -> list[EndToken]:
        return [EndToken(END, CONTROL[END], "a test")]

    def plan(self, config: object = None) -> Plan:
        return PLAN

    def token_piece(self, token_id: int) -> tuple[bytes, int]:
        return (CONTROL[token_id].encode(), 3) if token_id < FIRST_BYTE else (bytes([token_id - FIRST_BYTE]), 1)

    def encode(
        self, text: str | Sequence[TextPiece], *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        pieces = [TextPiece(text, parse_special)] if isinstance(text, str) else text
        ids: list[int] = []
        for piece in pieces:
            rest = piece.text
            while rest:
                control = next((c for c in CONTROL if piece.trusted and rest.startswith(c)), None)
                ids += [CONTROL.index(control)] if control else ids_of(rest[0])
                rest = rest.removeprefix(control) if control else rest[1:]
        return ids

    def decode(self, ids: Sequence[int], *, render_special: bool = False) -> str:
        shown = [i for i in ids if i >= FIRST_BYTE or render_special]
        return b"".join(self.token_piece(i)[0] for i in shown).decode("utf-8", "replace")


@dataclass
class FakeEngine:
    """See the module's text.

    Attributes:
        answer: texts of the tokens that every request is answered with at once; None: a test says what happens.
        submitted: what came, by id.
        masks: what was pushed.
        cancelled: ids in the order they were cancelled.
        heartbeat_age_s, has_failed: what the statistics say.
        config: what it was made with, where a server made it.
        max_queue: requests beyond this get QUEUE_FULL.
    """

    answer: Sequence[str] | None = None
    max_seq_len: int = 256
    max_queue: int = 64
    heartbeat_age_s: float = 0.0
    has_failed: bool = False
    decode_mode: DecodeMode = DecodeMode.BATCHED
    submitted: dict[int, Request] = field(default_factory=dict)
    cancelled: list[int] = field(default_factory=list)
    masks: list[TokenMask] = field(default_factory=list)
    is_draining: bool = False
    is_closed: bool = False
    config: Any = None

    def __post_init__(self) -> None:
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._events: list[Event] = []
        self._live: dict[int, int] = {}
        self._num_wake_ups = 0
        self.info = EngineInfo(
            device_kind="cpu", device_name="Fake", kernels="none", num_threads=1, threads_limit="a test",
            decode_mode=self.decode_mode, kv_type=KvType.F16, max_slots=4, max_seq_len=self.max_seq_len,
            prefill_chunk=32, block_size=16, max_queue=self.max_queue, plan=PLAN, load_s=0.0,
        )  # fmt: skip

    # ---- what the service calls ----

    def submit(self, request: Request) -> int:
        if self.has_failed:
            raise EngineFailedError("the step loop has stopped")
        if len(self._live) >= self.max_queue:
            raise QueueFullError("256 requests wait; retry later", details={"queue_limit": str(self.max_queue)})
        if len(request.prompt) >= self.max_seq_len:
            details = {"num_tokens": str(len(request.prompt)), "limit": str(self.max_seq_len)}
            raise PromptTooLongError("the prompt leaves no room", details=details)
        if request.max_tokens and request.min_tokens > request.max_tokens:
            raise InvalidArgumentError("min_tokens", details={"field": "min_tokens"})
        request_id = len(self.submitted) + 1
        self.submitted[request_id] = request
        self._live[request_id] = 0
        if self.answer is not None:
            self.accept(request_id)
            for text in self.answer:
                self.token(request_id, text)
            self.finish(request_id)
        return request_id

    def submit_outputs(self, request: Request, num_outputs: int) -> list[int]:
        return [self.submit(request) for _ in range(num_outputs)]

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)
        if request_id in self._live:
            self.finish(request_id, status=Status.CANCELLED)

    def take_events(self) -> list[Event]:
        if self.is_closed:
            raise EngineFailedError("the engine is closed")
        if self._events:
            os.eventfd_read(self.event_fd)
        taken, self._events = self._events, []
        return taken

    def push_masks(self, masks: Iterable[TokenMask]) -> None:
        self.masks += masks

    def drain(self) -> None:
        self.is_draining = True

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._live), num_waiting=0, slots_total=4, slots_used=len(self._live), blocks_total=64,
            blocks_used=len(self._live), blocks_cached=0, num_steps=3, num_prompt_tokens=10, num_cached_tokens=2,
            num_generated_tokens=7, num_requests_finished=0, num_requests_cancelled=0, num_requests_failed=0,
            num_preemptions=0, last_step_s=0.25, heartbeat_age_s=self.heartbeat_age_s, cancel_steps_max=0,
            workspace_bytes=0, is_draining=self.is_draining, has_failed=self.has_failed,
        )  # fmt: skip

    def slots(self) -> list[SlotInfo]:
        return []

    def slot(self, index: int) -> SlotInfo:
        raise self._no_slots()

    def acquire(
        self, decode_mode: DecodeMode = DecodeMode.AUTO, *, lease_s: float = 60.0, slot: int | None = None
    ) -> Slot:
        raise self._no_slots()

    def renew(self, slot: Slot, lease_s: float = 60.0) -> SlotInfo:
        raise self._no_slots()

    def release(self, slot: Slot) -> SlotInfo:
        raise self._no_slots()

    def count_cached(
        self,
        token_ids: Sequence[int],
        *,
        decode_mode: DecodeMode = DecodeMode.AUTO,
        cache_salt: bytes = b"",
        bypass_cache: bool = False,
    ) -> int:
        return 0

    def fork(self, slot: Slot, lease_s: float = 60.0) -> Slot:
        raise self._no_slots()

    def submit_prefill(
        self,
        slot: Slot,
        token_ids: Sequence[int],
        *,
        max_duration_s: float = 0.0,
        cache_salt: bytes = b"",
        bypass_cache: bool = False,
    ) -> int:
        raise self._no_slots()

    def submit_decode_slot(self, slot: Slot, request: Request) -> int:
        raise self._no_slots()

    def submit_decode_batch(self, entries: Sequence[tuple[Slot, Request]]) -> list[int]:
        raise self._no_slots()

    def _no_slots(self) -> Exception:
        return UnimplementedError("slots are tested with the real engine, in tests/e2e/test_slots.py")

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            os.close(self.event_fd)

    # ---- what a test lets happen ----

    @property
    def live(self) -> list[int]:
        return list(self._live)

    @property
    def num_waiting_events(self) -> int:
        return len(self._events)

    def accept(self, request_id: int = 1, *, num_cached: int = 0) -> None:
        request = self.submitted[request_id]
        mode = request.decode_mode or DecodeMode.BATCHED
        seed = 77 if request.sampling.seed is None else request.sampling.seed
        max_tokens = request.max_tokens or self.max_seq_len - len(request.prompt)
        self._put(AcceptedEvent(request_id, 2, 5, mode, seed, max_tokens, len(request.prompt), num_cached, 0.0))

    def prefill(self, num_computed: int, request_id: int = 1) -> None:
        self._put(PrefillEvent(request_id, len(self.submitted[request_id].prompt), 0, num_computed))

    def token(
        self,
        request_id: int,
        text: str,
        *,
        token_id: int | None = None,
        logprob: float | None = None,
        candidates: Sequence[Candidate] = (),
    ) -> None:
        index = self._live[request_id]
        self._live[request_id] += 1
        chosen = token_id if token_id is not None else (ids_of(text) or [END])[0]
        places = [candidate.token_id for candidate in candidates]
        rank = places.index(chosen) + 1 if chosen in places else None
        self._put(TokenEvent(request_id, chosen, index, text.encode(), text, logprob, list(candidates), rank=rank))

    def finish(
        self,
        request_id: int = 1,
        *,
        status: Status = Status.OK,
        reason: FinishReason = FinishReason.EOS,
        text: str = "",
        message: str = "",
        matched_stop: int | None = None,
    ) -> None:
        num_generated = self._live.pop(request_id)
        is_ok = status is Status.OK
        reason = reason if is_ok else FinishReason.NONE
        self._put(
            FinishedEvent(
                request_id, status, reason, END if reason is FinishReason.EOS else None, matched_stop, text, message,
                len(self.submitted[request_id].prompt), 0, num_generated, 0.0, 0.1, 0.2, 0.1,
            )
        )  # fmt: skip

    def _put(self, event: Event) -> None:
        self._events.append(event)
        if len(self._events) == 1:
            os.eventfd_write(self.event_fd, 1)
