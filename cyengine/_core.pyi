"""The engine as Python objects, over the C ABI of ``xllm.h``."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

from cyengine.types import (
    DecodeMode,
    EndToken,
    EngineConfig,
    EngineInfo,
    EngineStats,
    Event,
    Fact,
    FinishedEvent,
    Metadata,
    ModelInfo,
    Plan,
    Request,
    SamplingParams,
    Slot,
    SlotInfo,
    SlotStep,
    TensorInfo,
    TextPiece,
    TokenMask,
)

version: str
build_id: str

def exit_on_lost_file(fd: int = 2, exit_status: int = 1) -> None:
    """End the process in words when a model file is shortened under it, from now on.

    A model's weights are read from its file's map. Where somebody shortens that file in place, the next read of what is
    gone is a SIGBUS: with this, one line on ``fd`` names the file, and the process exits with ``exit_status``. Any
    other SIGBUS stays what it was. For the whole process: for a program to call, once it knows its log.
    """

class Model:
    """An opened GGUF file: metadata, tensors and tokenizer, no weights loaded.

    Raises a :class:`cyengine.errors.ModelError` naming the key or tensor and the byte offset when the file is
    refused, NotFoundError or IoError when it cannot be read. ``close`` is idempotent; engines made from the model go on
    without it.
    """

    def __init__(self, path: str | os.PathLike[str], *, pretokenizer: str | None = None) -> None:
        """Map the file at `path` (the first shard of a split one).

        Args:
            path: the GGUF file.
            pretokenizer: overrides ``tokenizer.ggml.pre``, or stands in where the file lacks it.
        """

    def __enter__(self) -> Self: ...
    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None: ...
    def close(self) -> None:
        """Unmap the file."""
    @property
    def info(self) -> ModelInfo:
        """Dimensions and names."""
    def metadata(self) -> list[Metadata]:
        """Every key of the file, in its order."""
    def tensors(self) -> list[TensorInfo]:
        """Every tensor of the file, in its order."""
    def facts(self) -> list[Fact]:
        """What was inferred while reading the file, with its source."""
    def end_tokens(self) -> list[EndToken]:
        """The end-of-generation set, with the source of each member."""
    def encode(
        self,
        text: str | bytes | Sequence[TextPiece],
        *,
        add_special: bool = True,
        parse_special: bool = False,
    ) -> list[int]:
        """Encode text, or pieces of text that follow one another, into token ids.

        Args:
            text: the text; in pieces, each says whether it may spell control tokens.
            add_special: put BOS and EOS where the vocabulary asks for them, BOS exactly once.
            parse_special: for a plain text: written control tokens become those tokens.

        Raises:
            NoTokenizerError: the file has no usable tokenizer.
            InvalidArgumentError: the text is not valid UTF-8.
        """
    def decode(self, ids: Sequence[int], *, render_special: bool = False) -> str:
        """The text of a sequence of ids; bytes that form no code point become U+FFFD."""
    def token_piece(self, token_id: int) -> tuple[bytes, int]:
        """The raw bytes of one token and its type (numbers of ``tokenizer.ggml.token_type``)."""
    def plan(self, config: EngineConfig | None = None) -> Plan:
        """What an engine with `config` would take on this machine; loads nothing."""

class Engine:
    """One model on one device, with a step loop on its own thread.

    Thread-safe. ``close`` is idempotent, ends live requests without an event and makes waiting calls raise
    EngineFailedError.
    """

    def __init__(self, model: Model | str | os.PathLike[str], config: EngineConfig | None = None) -> None:
        """Load the weights and start the step loop; waits until both are done.

        Raises:
            InvalidArgumentError: a field of `config` is out of range.
            MemoryLimitError: the Plan does not fit; details say bytes_needed, bytes_free and the remedy.
            UnimplementedError: the backend does not offer the mode or KV type.
            DeviceError: CUDA was asked for and is not usable.
        """

    def __enter__(self) -> Self: ...
    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None: ...
    def close(self) -> None:
        """Stop the step loop and free everything."""
    @property
    def model(self) -> Model:
        """The model that the engine runs."""
    @property
    def info(self) -> EngineInfo:
        """Device, effective options and Plan."""
    def submit(self, request: Request, *, private: bool = False) -> int:
        """Queue one request and return its id; never waits for the device.

        Args:
            request: what to generate.
            private: its events go only to ``take_events(request_id)``, not into the common queue.

        Raises:
            InvalidArgumentError: a field is out of range (also PromptTooLongError, NeverFitsError).
            DecodeModeMismatchError: the engine decodes the other way.
            QueueFullError: nothing was queued.
            DrainingError: the engine takes no new work.
            EngineFailedError: the step loop has stopped.
        """
    def submit_outputs(self, request: Request, num_outputs: int, *, private: bool = False) -> list[int]:
        """Queue several outputs of one request, all or none; returns the id of each.

        Each is a request of its own, with its own seat and events; output ``i`` draws with the seed plus ``i``. The
        prompt is computed once, and its blocks are shared. Raises as ``submit``.
        """
    def count_cached(
        self,
        token_ids: Sequence[int],
        *,
        decode_mode: DecodeMode = DecodeMode.AUTO,
        cache_salt: bytes = b"",
        bypass_cache: bool = False,
    ) -> int:
        """How many leading tokens of a prompt the prefix cache would give it now; never waits for the step loop."""
    def cancel(self, request_id: int) -> None:
        """End a request; its FinishedEvent says CANCELLED. Harmless for one that has ended."""
    def push_masks(self, masks: Iterable[TokenMask]) -> None:
        """Say which tokens constrained requests may choose at positions of theirs; never waits for the device.

        A position whose mask has not come is not computed: its request sits steps out while the others go on. So submit
        with ``is_constrained``, push the mask of token 0 at once, and on each TokenEvent with ``wants_mask`` push that
        of ``token_index + 1``. All masks of one call come into effect together: push those that one
        ``take_events`` asks for in one call, or their requests are spread over several steps.

        Ends of generation are allowed only where the mask says so, and end the answer as ever. Biases, penalties and
        min_tokens apply within the mask; when nothing is left the request ends as INVALID_ARGUMENT. Padding ids
        stay forbidden whatever a mask says. Masks may come ahead of their turn; a later one for a position takes the
        earlier one's place; those that come too late, or for a request that has ended, are dropped.

        Args:
            masks: any number of them, taken as a whole or not at all.

        Raises:
            InvalidArgumentError: a mask of another size than the vocabulary's, or a token_index beyond max_seq_len;
                ``details["entry"]`` is its index.
            NotFoundError: a request_id that was never given out.
        """
    @property
    def event_fd(self) -> int:
        """A descriptor that is readable while events of the common queue wait.

        For an event loop; not to be read or closed.
        """
    def take_events(self, request_id: int = 0, timeout_s: float = 0.0) -> list[Event]:
        """Take what has happened, in order for each request.

        Args:
            request_id: 0 for the common queue, else a private request.
            timeout_s: how long to wait while there is nothing; negative: without limit.

        Raises:
            NotFoundError: no such private request, or its FinishedEvent has been taken.
            EngineFailedError: the engine was closed.
        """
    def stream(self, request: Request) -> Iterator[Event]:
        """Submit `request` and yield its events; closing the iterator cancels it and returns its slot."""
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        add_special: bool = True,
        parse_special: bool = False,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        seed: int | None = None,
        max_tokens: int = 0,
        min_tokens: int = 0,
        ignore_eos: bool = False,
        num_logprobs: int | None = None,
        stop_strings: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        logit_bias: Mapping[int, float] = ...,
        decode_mode: DecodeMode = DecodeMode.AUTO,
        priority: int = 0,
        max_queue_s: float = 0.0,
        max_duration_s: float = 0.0,
        is_constrained: bool = False,
        cache_salt: bytes = b"",
        bypass_cache: bool = False,
        tenant: int = 0,
    ) -> Iterator[Event]:
        """``stream`` for a text or ids, with the fields of Request and SamplingParams as keywords."""
    def drain(self) -> None:
        """Refuse new requests from now on; those that are in go on."""
    def stats(self) -> EngineStats:
        """A snapshot; never waits for the step loop."""
    def slots(self) -> list[SlotInfo]:
        """A snapshot of every slot; never waits for the step loop."""
    def slot(self, index: int) -> SlotInfo:
        """A snapshot of one slot; never waits for the step loop. NotFoundError: no slot of that number."""

    # ---- slots as a resource: own one, fill it, decode it, give it back. ``xllm.h`` says how slots and requests
    # share an engine.
    #
    # Every call that takes a Slot raises StaleEpochError when it changed hands or was released, LeaseLostError when
    # its lease ran out, NotFoundError for a number that no slot has. Nothing changes where a call is refused.

    def acquire(
        self, decode_mode: DecodeMode = DecodeMode.AUTO, *, lease_s: float = 60.0, slot: int | None = None
    ) -> Slot:
        """Own a free slot for `lease_s` seconds; never waits for the step loop.

        Args:
            decode_mode: the mode of the slot until it is free again; the result has the effective one.
            lease_s: length of the lease, more than 0; ``renew`` starts it anew.
            slot: this very slot, or none at all; None: any.

        Raises:
            DecodeModeMismatchError: the engine decodes the other way.
            NoFreeSlotError: all are taken, or the one asked for is.
            MemoryLimitError: an AUTO engine cannot load the set of weights that this mode needs; nothing is allocated.
            DrainingError: the engine takes no new work.
        """
    def renew(self, slot: Slot, lease_s: float = 60.0) -> SlotInfo:
        """Let the lease end `lease_s` seconds from now."""
    def release(self, slot: Slot) -> SlotInfo:
        """End the ownership; a call that runs in the slot ends as LEASE_LOST. Its blocks are back within one step."""
    def fork(self, slot: Slot, lease_s: float = 60.0) -> Slot:
        """Own a further slot that continues from where a READY one is, READY at once; they share their blocks.

        Raises:
            SlotStateError: the slot is not READY.
            NoFreeSlotError: all are taken.
        """
    def submit_prefill(
        self,
        slot: Slot,
        token_ids: Sequence[int],
        *,
        private: bool = False,
        max_duration_s: float = 0.0,
        cache_salt: bytes = b"",
        bypass_cache: bool = False,
    ) -> int:
        """Start to compute a prompt into an ACQUIRED slot, or to append one to a READY slot; returns the call's id.

        Its events come as a request's: AcceptedEvent, PrefillEvent after each chunk, FinishedEvent (PREFILLED).
        ``cancel`` ends it and leaves the slot as it was before. Salt and bypass are as of a Request; those of a slot's
        first prompt count.

        Raises:
            SlotStateError: something runs in the slot.
            PromptTooLongError: history and prompt leave no room for a token.
            NeverFitsError: they exceed the whole KV pool.
        """
    def prefill(self, slot: Slot, token_ids: Sequence[int]) -> FinishedEvent:
        """``submit_prefill`` and wait for its end; raises what it failed with (also KvExhaustedError)."""
    def submit_decode_slot(self, slot: Slot, request: Request, *, private: bool = False) -> int:
        """Per-slot API: generate in one READY slot; returns the call's id.

        Args:
            slot: acquired PER_SLOT.
            request: how to generate, without prompt; priority and max_queue_s do nothing.
            private: as for ``submit``.

        Raises:
            DecodeModeMismatchError: the slot is a batched one.
            SlotStateError: the slot is not READY, or is full.
        """
    def submit_decode_batch(self, entries: Sequence[tuple[Slot, Request]], *, private: bool = False) -> list[int]:
        """Batched API: generate in several READY slots in lock-step; one id for each entry.

        Each has its own events. All begin in the same step, and each that still runs advances one token in every step.
        Refused as a whole when one entry is (``details["entry"]`` is its index).

        Raises:
            DecodeModeMismatchError: a slot is a per-slot one.
            SlotStateError: a slot is not READY, or is full.
        """
    def decode_step_slot(self, slot: Slot, sampling: SamplingParams | None = None, *, logits: bool = False) -> SlotStep:
        """Per-slot API: one token; waits for that step. Greedy unless `sampling` says otherwise."""
    def decode_step_batch(
        self,
        slots: Sequence[Slot],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        logits: bool = False,
    ) -> list[SlotStep]:
        """Batched API: one token for each slot, all in the same step; waits for it.

        When some fail, the first one's error is raised with ``details["entry"]``; the other slots have advanced.
        """
