"""Failures of calls, as typed exceptions.

A failed call has a gRPC status whose details (google.rpc.Status) say why. `from_rpc_error` turns it into the exception
class of its code, or of its reason for the few that programs treat on their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import grpc
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from xllm_client.v1 import generation_pb2, plan_pb2

_DOMAIN = "xllm"


@dataclass(frozen=True)
class FieldViolation:
    """One wrong field of a request: its path, such as `spec.sampling.top_p`, and what is wrong."""

    field: str
    description: str


class XllmError(Exception):
    """A call failed.

    Attributes:
        code: The gRPC status code.
        reason: Why, such as "QUEUE_FULL" (the names of xllm.v1.ErrorReason); "" when the server did not say.
        message: One line for people.
        metadata: What the reason is about, such as {"engine_mode": "BATCHED", ...}.
        retry_delay_s: Seconds after which the server suggests to try again; None when it does not.
        field_violations: The wrong fields of the request.
        usage: Tokens used until then, of a generation that failed after it began.
        plan: What does not fit, for reason "MEMORY".
    """

    def __init__(self, code: grpc.StatusCode, message: str, reason: str = "") -> None:
        self.code = code
        self.message = message
        self.reason = reason
        self.metadata: dict[str, str] = {}
        self.retry_delay_s: float | None = None
        self.field_violations: tuple[FieldViolation, ...] = ()
        self.usage: generation_pb2.Usage | None = None
        self.plan: plan_pb2.Plan | None = None
        super().__init__(message)

    def __str__(self) -> str:
        label = f"{self.code.name} ({self.reason})" if self.reason else self.code.name
        return f"{label}: {self.message}"


class InvalidArgumentError(XllmError):
    """The request is wrong and will stay wrong; `field_violations` names the fields."""


class NotFoundError(XllmError):
    """The model, slot or request id is unknown or has expired."""


class AlreadyExistsError(XllmError):
    """The request id or engine name is taken."""


class FailedPreconditionError(XllmError):
    """The server's state contradicts the call."""


class DecodeModeMismatchError(FailedPreconditionError):
    """The call contradicts the engine's DecodeMode; metadata: engine_mode, requested_mode, call, remedy."""


class ResourceExhaustedError(XllmError):
    """Something is used up: queue, slots, KV blocks or memory."""


class QueueFullError(ResourceExhaustedError):
    """The queue is full; nothing was queued."""


class AbortedError(XllmError):
    """The slot changed owner, or its lease ended."""


class UnavailableError(XllmError):
    """No server answers, or it is loading, draining or broken."""


class DataLossError(XllmError):
    """A file is cut short, or saved state cannot be trusted."""


class DeadlineExceededError(XllmError):
    """The call's time is over."""


class CallCancelledError(XllmError):
    """The call was cancelled."""


class UnauthenticatedError(XllmError):
    """The server wants a credential, or another one."""


class PermissionDeniedError(XllmError):
    """The caller may not do this."""


class UnimplementedError(XllmError):
    """The server's build or model lacks this."""


class InternalError(XllmError):
    """A fault of the server."""


_BY_CODE: dict[grpc.StatusCode, type[XllmError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPreconditionError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhaustedError,
    grpc.StatusCode.ABORTED: AbortedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DATA_LOSS: DataLossError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: CallCancelledError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.UNIMPLEMENTED: UnimplementedError,
    grpc.StatusCode.INTERNAL: InternalError,
}
_BY_REASON: dict[str, type[XllmError]] = {
    "DECODE_MODE_MISMATCH": DecodeModeMismatchError,
    "QUEUE_FULL": QueueFullError,
}


def from_rpc_error(error: grpc.RpcError, endpoint: str, *, began: bool = False) -> XllmError:
    """Return the exception for a failed call to the server at `endpoint`; `began`: it had answered already."""
    call = cast("grpc.Call", error)
    status = _status(call)
    info = error_details_pb2.ErrorInfo()
    reason = ""
    if _unpack(status, info) and info.domain == _DOMAIN:
        reason = info.reason
    message = call.details() or ""
    code = call.code()
    if code == grpc.StatusCode.UNAVAILABLE and not reason:
        if began:
            message = f"the connection to {endpoint} broke ({message})"
        else:
            message = f"no xLLM server answers at {endpoint}; start one with `xllm serve`, or name another ({message})"
    kind = _BY_REASON.get(reason) or _BY_CODE.get(code, XllmError)
    failure = kind(code, message, reason)
    failure.metadata = dict(info.metadata) if reason else {}
    _add_details(failure, status)
    return failure


def _status(call: grpc.Call) -> status_pb2.Status | None:
    """Return the status details; None when there are none, or they contradict the status itself."""
    try:
        return cast("status_pb2.Status | None", rpc_status.from_call(call))
    except Exception:  # note: ValueError and protobuf's DecodeError; a broken trailer must not hide the failure
        return None


def _unpack(status: status_pb2.Status | None, message: Any) -> bool:
    """Fill `message` from the first detail of its type, and return whether there is one."""
    for detail in status.details if status is not None else ():
        if detail.Is(message.DESCRIPTOR):
            return bool(detail.Unpack(message))
    return False


def _add_details(failure: XllmError, status: status_pb2.Status | None) -> None:
    retry = error_details_pb2.RetryInfo()
    if _unpack(status, retry):
        failure.retry_delay_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    bad = error_details_pb2.BadRequest()
    if _unpack(status, bad):
        failure.field_violations = tuple(FieldViolation(v.field, v.description) for v in bad.field_violations)
    usage = generation_pb2.Usage()
    if _unpack(status, usage):
        failure.usage = usage
    plan = plan_pb2.Plan()
    if _unpack(status, plan):
        failure.plan = plan
