"""Client of xLLM: streams tokens of GGUF models over gRPC.

    with Client() as client:
        for event in client.generate("The capital of France is", max_tokens=32):
            print(event.text, end="", flush=True)

`Client` is for ordinary code, `AsyncClient` for asyncio; both have the same methods. `xllm_client.v1` holds the
contract's own messages and stubs.
"""

from xllm_client.aio import AsyncClient, AsyncGeneration
from xllm_client.aio_slots import AsyncSlot
from xllm_client.client import Client, Generation
from xllm_client.endpoint import Endpoint, default_endpoint
from xllm_client.errors import (
    AbortedError,
    AlreadyExistsError,
    CallCancelledError,
    DataLossError,
    DeadlineExceededError,
    DecodeModeMismatchError,
    FailedPreconditionError,
    FieldViolation,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    QueueFullError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
    XllmError,
)
from xllm_client.events import Event, Result, finish_reason_name
from xllm_client.retry import NO_RETRY, RetryPolicy
from xllm_client.slots import Slot
from xllm_client.types import ChatOptions, DecodeMode, DecodeSlotOptions, GenerateOptions, Message, Prompt, Tls

__all__ = [
    "NO_RETRY",
    "AbortedError",
    "AlreadyExistsError",
    "AsyncClient",
    "AsyncGeneration",
    "AsyncSlot",
    "CallCancelledError",
    "ChatOptions",
    "Client",
    "DataLossError",
    "DeadlineExceededError",
    "DecodeMode",
    "DecodeModeMismatchError",
    "DecodeSlotOptions",
    "Endpoint",
    "Event",
    "FailedPreconditionError",
    "FieldViolation",
    "GenerateOptions",
    "Generation",
    "InternalError",
    "InvalidArgumentError",
    "Message",
    "NotFoundError",
    "PermissionDeniedError",
    "Prompt",
    "QueueFullError",
    "ResourceExhaustedError",
    "Result",
    "RetryPolicy",
    "Slot",
    "Tls",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "XllmError",
    "default_endpoint",
    "finish_reason_name",
]
