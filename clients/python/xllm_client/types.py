"""What callers pass: prompts, options, decode modes, TLS settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, TypedDict

from xllm_client.v1 import chat_pb2, slot_pb2

# A prompt: text, or token ids that are used as they are.
Prompt = str | Sequence[int]
# One turn of a conversation: {"role": "user", "content": "Hi"}, or the message itself.
Message = Mapping[str, Any] | chat_pb2.ChatMessage


class DecodeMode(IntEnum):
    """How tokens are decoded; the numbers of the contract and the C ABI."""

    AUTO = 0
    BATCHED = 1
    PER_SLOT = 2


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of a generation. What is left out has the server's default; see protos/xllm/v1/sampling.proto.

    sampling: temperature (0: greedy) .. seed. Ending: max_tokens .. ignore_eos. Constraint: at most one of json_schema
    .. json_object. Reporting: token_ids, top_logprobs. `timeout_s` bounds the whole call, retries included.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    json_schema: str | Mapping[str, Any]
    regex: str
    grammar: str
    choice: Sequence[str]
    json_object: bool
    token_ids: bool
    top_logprobs: int
    request_id: str
    model: str
    expected_digest: str
    add_special_tokens: bool
    parse_special: bool
    decode_mode: DecodeMode
    slot: slot_pb2.SlotRef
    cache_salt: str
    cache_bypass: bool
    max_queue_time_s: float
    max_duration_s: float
    priority: int
    num_outputs: int
    timeout_s: float


class DecodeSlotOptions(TypedDict, total=False):
    """Keyword arguments of a decode in a slot: those of GenerateOptions that are about choosing and ending."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    json_schema: str | Mapping[str, Any]
    regex: str
    grammar: str
    choice: Sequence[str]
    json_object: bool
    token_ids: bool
    top_logprobs: int
    request_id: str
    max_duration_s: float
    timeout_s: float


class ChatOptions(GenerateOptions, total=False):
    """Keyword arguments of a chat: those of a generation, and what the chat template takes.

    Objects become JSON text with their key order and number forms kept; text is taken as JSON already.
    """

    tools: str | Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    template_args: str | Mapping[str, Any]
    add_generation_prompt: bool


@dataclass(frozen=True)
class Tls:
    """TLS to a server on TCP: certificates as PEM bytes.

    Attributes:
        root_certificates: Whom to trust; None: the system's.
        private_key, certificate_chain: The client's own, for servers that ask for one (mTLS).
        server_name: The name the server's certificate has, when it is not the endpoint's host.
    """

    root_certificates: bytes | None = None
    private_key: bytes | None = None
    certificate_chain: bytes | None = None
    server_name: str | None = None

    @classmethod
    def from_files(
        cls,
        root: Path | None = None,
        key: Path | None = None,
        cert: Path | None = None,
        server_name: str | None = None,
    ) -> Tls:
        """Read PEM files. Raises OSError."""
        root_pem, key_pem, cert_pem = (path.read_bytes() if path is not None else None for path in (root, key, cert))
        return cls(root_pem, key_pem, cert_pem, server_name)
