"""Plain data that goes into and comes out of the engine.

Enum numbers are those of ``xllm.h``; the extension module checks them when it is imported.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
"""What supports the buffer protocol (``collections.abc.Buffer`` from Python 3.12 on)."""


class DecodeMode(enum.IntEnum):
    """Which of the two ways to decode; the same numbers in C and in the protobuf contract."""

    AUTO = 0
    """Of an engine: load each set of weights on first use. Of a request: what the engine implies."""
    BATCHED = 1
    """Raw quantised weights, integer kernels, continuous batching."""
    PER_SLOT = 2
    """Weights dequantised to f32, one slot at a time: the accuracy reference."""


class Backend(enum.IntEnum):
    """The device that computes."""

    AUTO = 0
    """CUDA where there is a usable device, else the CPU."""
    CPU = 1
    CUDA = 2


class KvType(enum.IntEnum):
    """How keys and values are stored."""

    F16 = 0
    INT8 = 1
    INT4 = 2


class FinishReason(enum.IntEnum):
    """Why a generation ended."""

    NONE = 0
    """It failed; see the event's status."""
    EOS = 1
    STOP_TOKEN = 2
    STOP_STRING = 3
    MAX_TOKENS = 4
    CONTEXT_FULL = 5
    """max_seq_len was reached before max_tokens."""
    PREFILLED = 6
    """A prefill: the prompt is in the slot."""


class SlotState(enum.IntEnum):
    """Where a slot is in its life."""

    FREE = 0
    ACQUIRED = 1
    PREFILLING = 2
    READY = 3
    DECODING = 4
    STALLED = 5
    CANCELLING = 6


class Status(enum.IntEnum):
    """Outcome of a call or of a request; one value for each reason that a caller can act on."""

    OK = 0
    INVALID_ARGUMENT = 1
    PROMPT_TOO_LONG = 2
    NEVER_FITS = 3
    NOT_FOUND = 4
    ALREADY_EXISTS = 5
    DECODE_MODE_MISMATCH = 6
    SLOT_STATE = 7
    NO_TOKENIZER = 8
    NO_CHAT_TEMPLATE = 9
    QUEUE_FULL = 10
    QUEUE_TIMEOUT = 11
    NO_FREE_SLOT = 12
    KV_EXHAUSTED = 13
    MEMORY = 14
    STALE_EPOCH = 15
    LEASE_LOST = 16
    PERMISSION_DENIED = 17
    CANCELLED = 18
    DEADLINE_EXCEEDED = 19
    MODEL_MALFORMED = 20
    MODEL_TRUNCATED = 21
    MODEL_UNSUPPORTED = 22
    UNIMPLEMENTED = 23
    NON_FINITE_LOGITS = 24
    DEVICE = 25
    ENGINE_FAILED = 26
    DRAINING = 27
    IO = 28
    INTERNAL = 29
    DEADLINE_UNREACHABLE = 30


# ---- what a model says of itself ----


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The dimensions and names of an opened model file; fields as in ``xllm_model_info``."""

    architecture: str
    name: str
    path: str
    file_bytes: int
    num_params: int
    has_weights: bool
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_real_tokens: int
    context_length: int
    tokenizer_model: str
    pretokenizer: str
    has_tokenizer: bool
    bos_token_id: int | None
    add_bos: bool
    chat_template: str


@dataclass(frozen=True, slots=True)
class Metadata:
    """One key of the file. ``value_json`` shows at most 16 elements of an array."""

    key: str
    type: str
    value_json: str


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file; ``dims[0]`` is the length of a row."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    size_bytes: int
    file_offset: int


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that was inferred while reading the file, and from what."""

    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class EndToken:
    """A member of the end-of-generation set."""

    token_id: int
    text: str
    source: str


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text to encode; only a trusted piece (template text) may spell control tokens."""

    text: str
    trusted: bool = False
    is_plain: bool = False
    """Part of no special token of any kind, those that are ordinary text included."""


# ---- what an engine is asked for ----


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of an engine; zero and ``None`` mean the default that ``xllm.h`` states."""

    backend: Backend = Backend.AUTO
    decode_mode: DecodeMode = DecodeMode.BATCHED
    kv_type: KvType = KvType.F16
    max_slots: int = 8
    """Requests decoding at once, 1 to 1024."""
    max_seq_len: int = 0
    """Tokens of prompt and answer together; 0: the model's context length."""
    allow_long_context: bool = False
    """Let max_seq_len exceed the model's context length."""
    prefill_chunk: int = 512
    """Prompt tokens computed per step at most, 1 to 8192."""
    block_size: int = 64
    """Token positions per KV block: 16, 32, 64 or 128."""
    max_queue: int = 256
    """Requests that may wait for a slot."""
    num_threads: int = 0
    """CPU threads; 0: min(affinity, cgroup quota, physical cores)."""
    device_index: int = 0
    kv_memory: int = 0
    """Bytes of the KV pool; 0: auto."""
    memory_limit: int = 0
    """Bytes the engine may take on its device; 0: no limit."""
    instruction_set: str | None = None
    """"scalar", "avx2", "avx512" or "neon"; None: the best the CPU has."""
    max_token_gap_s: float = 0.2
    """Seconds between two tokens of a stream at most, by computing prompts in smaller pieces; 0: no bound."""
    log_fd: int | None = None
    """File descriptor that gets one line per notice; None: silent."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes an engine would take, before anything is loaded; fields as in ``xllm_plan``."""

    raw_weight_bytes: int
    dequantized_weight_bytes: int
    mapped_bytes: int
    kv_bytes_per_token: int
    kv_pool_bytes: int
    kv_num_blocks: int
    scratch_bytes: int
    table_bytes: int
    total_bytes: int
    device_total_bytes: int
    device_free_bytes: int
    block_size: int
    fits: bool


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine became: device, effective options, Plan."""

    device_kind: str
    device_name: str
    kernels: str
    num_threads: int
    threads_limit: str
    decode_mode: DecodeMode
    kv_type: KvType
    max_slots: int
    max_seq_len: int
    prefill_chunk: int
    block_size: int
    max_queue: int
    plan: Plan
    load_s: float


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is chosen; the defaults are neutral and greedy. Ranges are stated in ``xllm.h``."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    """None: one is drawn, and echoed in the accepted event."""


@dataclass(frozen=True, slots=True)
class Request:
    """One generation."""

    prompt: Sequence[int] = ()
    """Token ids, at least one; none for a decode of slots, which hold theirs already."""
    sampling: SamplingParams = SamplingParams()
    max_tokens: int = 0
    """0: as many as max_seq_len leaves room for."""
    min_tokens: int = 0
    """Before it no end and no stop token is chosen, and no stop string looked for; within a mask as push_masks says."""
    ignore_eos: bool = False
    num_logprobs: int | None = None
    """None: none; 0 to 20: the chosen token's and so many of the best candidates'."""
    stop_strings: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    decode_mode: DecodeMode = DecodeMode.AUTO
    priority: int = 0
    """Larger goes first."""
    max_queue_s: float = 0.0
    """Seconds to wait for a slot; 0: no limit."""
    max_duration_s: float = 0.0
    """Seconds from submission; 0: no limit."""
    is_constrained: bool = False
    """Each token waits for its mask: see ``Engine.push_masks``."""
    cache_salt: bytes = b""
    """Only prompts of equal salt share blocks of the prefix cache; at most 4096 bytes."""
    bypass_cache: bool = False
    """Look nothing up in the prefix cache, and leave nothing in it."""
    tenant: int = 0
    """Whose it is; among waiting requests of one priority, tenants take turns."""


@dataclass(frozen=True, slots=True)
class TokenMask:
    """The tokens that a constrained request may choose at one position."""

    request_id: int
    token_index: int
    """Of the token to be chosen; 0 for the first one of the request or call."""
    words: Buffer
    """``4 * ceil(vocab_size / 32)`` contiguous bytes, copied: little-endian 32-bit words whose bit ``i % 32`` of word
    ``i // 32`` allows id ``i``. ``bytes``, ``bytearray``, ``memoryview``, or the ``data`` of a NumPy row."""


# ---- what an engine reports ----


@dataclass(slots=True)
class AcceptedEvent:
    """First event of a request that got a slot."""

    request_id: int
    slot: int
    epoch: int
    decode_mode: DecodeMode
    seed: int
    max_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    queue_s: float
    wants_mask: bool = False
    """The mask of token 0 of a constrained request has not come yet."""


@dataclass(slots=True)
class PrefillEvent:
    """After each chunk of a prompt that takes several."""

    request_id: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int


@dataclass(slots=True)
class Candidate:
    """A token that could have been chosen."""

    token_id: int
    logprob: float


@dataclass(slots=True)
class TokenEvent:
    """One generated token, and the text it releases (whole code points, perhaps none)."""

    request_id: int
    token_id: int
    token_index: int
    piece: bytes
    text: str
    logprob: float | None
    candidates: list[Candidate]
    wants_mask: bool = False
    """A constrained request goes on, and the mask of token ``token_index + 1`` has not come yet."""
    rank: int | None = None
    """Its place among all tokens by logprob, from 1; None where no logprobs were asked for."""


@dataclass(slots=True)
class FinishedEvent:
    """Last event of a request; always comes."""

    request_id: int
    status: Status
    finish_reason: FinishReason
    matched_token_id: int | None
    matched_stop: int | None
    text: str
    """Text that was held back and is released now."""
    message: str
    """Why it failed, where status is not OK."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float
    ttft_s: float
    """Submission to first token; 0 where there was none."""
    num_preemptions: int = 0
    """Times that it gave its blocks back and was resumed."""
    details: dict[str, str] = field(default_factory=dict)
    """Facts for programs about why it failed, such as ``blocks_needed``."""


Event = AcceptedEvent | PrefillEvent | TokenEvent | FinishedEvent


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of an engine; fields as in ``xllm_engine_stats``."""

    num_running: int
    num_waiting: int
    slots_total: int
    slots_used: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_requests_finished: int
    num_requests_cancelled: int
    num_requests_failed: int
    num_preemptions: int
    last_step_s: float
    heartbeat_age_s: float
    cancel_steps_max: int
    workspace_bytes: int
    is_draining: bool
    has_failed: bool
    token_gap_bound_s: float = 0.0
    token_gap_max_s: float = 0.0
    prefill_tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Slot:
    """One ownership of a slot, as ``Engine.acquire`` returned it; passed to every call on the slot."""

    index: int
    epoch: int
    """Raised each time that the slot is acquired; a stale one is refused."""
    decode_mode: DecodeMode = DecodeMode.AUTO
    """The effective mode; for information."""


@dataclass(frozen=True, slots=True)
class SlotStep:
    """What one step chose for a slot."""

    token_id: int
    logits: bytes | None = None
    """float32 of the row that chose it, before biases and penalties (``numpy.frombuffer``); None unless asked for."""


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """A snapshot of one slot; fields as in ``xllm_slot_info``."""

    slot: int
    epoch: int
    state: SlotState
    decode_mode: DecodeMode
    """Effective while owned; AUTO for a free slot."""
    request_id: int | None
    """The call or request that runs in it."""
    num_tokens: int
    num_blocks: int
    is_acquired: bool = False
    """Owned through ``Engine.acquire``; False for a free slot and for a request's own."""
    lease_left_s: float = 0.0
    """Seconds until the lease of an acquired slot ends."""
    owned_s: float = 0.0
    """Seconds since the present owner got it."""
