"""How a call fails: our exception, and the one table from reason to gRPC code and details.

Code below the servicers raises ServiceError with a Reason; the interceptor turns it into a status. The rows follow
error_reason.proto, and nothing else in the service knows a gRPC code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

DOMAIN = "xllm"
# All trailers of a call stay under 4 KB on the wire, where a status grows by a third (base64) and its message, which
# travels once more on its own, up to threefold (percent encoding). Bytes:
_MAX_STATUS = 2000
_MAX_MESSAGE = 400
_MAX_VALUE = 200
_MAX_METADATA = 6  # entries: with them ErrorInfo always fits
_MAX_VIOLATIONS = 4


class Reason(StrEnum):
    """ErrorInfo.reason: the names of error_reason.proto without their prefix."""

    INVALID_FIELD = "INVALID_FIELD"
    MALFORMED_REQUEST = "MALFORMED_REQUEST"
    INVALID_CONSTRAINT = "INVALID_CONSTRAINT"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    NEVER_FITS = "NEVER_FITS"
    TEMPLATE_REFUSED = "TEMPLATE_REFUSED"
    INVALID_MODEL = "INVALID_MODEL"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    SLOT_NOT_FOUND = "SLOT_NOT_FOUND"
    REQUEST_NOT_FOUND = "REQUEST_NOT_FOUND"
    REQUEST_ID_IN_USE = "REQUEST_ID_IN_USE"
    ENGINE_EXISTS = "ENGINE_EXISTS"
    DECODE_MODE_MISMATCH = "DECODE_MODE_MISMATCH"
    MODEL_DIGEST_MISMATCH = "MODEL_DIGEST_MISMATCH"
    SLOT_STATE = "SLOT_STATE"
    NO_CHAT_TEMPLATE = "NO_CHAT_TEMPLATE"
    NO_TOKENIZER = "NO_TOKENIZER"
    QUEUE_FULL = "QUEUE_FULL"
    QUEUE_TIMEOUT = "QUEUE_TIMEOUT"
    NO_FREE_SLOT = "NO_FREE_SLOT"
    KV_EXHAUSTED = "KV_EXHAUSTED"
    MEMORY = "MEMORY"
    CLIENT_STALLED = "CLIENT_STALLED"
    TOO_MANY_CALLS = "TOO_MANY_CALLS"
    STALE_EPOCH = "STALE_EPOCH"
    LEASE_LOST = "LEASE_LOST"
    LOADING = "LOADING"
    DRAINING = "DRAINING"
    ENGINE_FAILED = "ENGINE_FAILED"
    COMPILER_UNAVAILABLE = "COMPILER_UNAVAILABLE"
    RENDERER_UNAVAILABLE = "RENDERER_UNAVAILABLE"
    TRUNCATED_MODEL = "TRUNCATED_MODEL"
    RESTORE_UNPROVEN = "RESTORE_UNPROVEN"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    DEADLINE_UNREACHABLE = "DEADLINE_UNREACHABLE"
    CANCELLED = "CANCELLED"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    FOREIGN_SLOT = "FOREIGN_SLOT"
    NOT_IMPLEMENTED = "NOT_IMPLEMENTED"
    UNSUPPORTED_MODEL = "UNSUPPORTED_MODEL"
    INTERNAL = "INTERNAL"
    NON_FINITE_LOGITS = "NON_FINITE_LOGITS"
    DEVICE_FAULT = "DEVICE_FAULT"


class Detail(Enum):
    """What a status carries besides ErrorInfo."""

    NONE = "nothing more"
    FIELDS = "BadRequest"
    RESOURCE = "ResourceInfo"
    PRECONDITION = "PreconditionFailure"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        code: the gRPC status code.
        detail: the kind of detail that goes with it.
        retry_delay_s: RetryInfo for a failure that waiting can help; None where it cannot.
    """

    code: grpc.StatusCode
    detail: Detail = Detail.NONE
    retry_delay_s: float | None = None


_C = grpc.StatusCode
TABLE: Mapping[Reason, Row] = {
    Reason.INVALID_FIELD: Row(_C.INVALID_ARGUMENT, Detail.FIELDS),
    Reason.MALFORMED_REQUEST: Row(_C.INVALID_ARGUMENT, Detail.FIELDS),
    Reason.INVALID_CONSTRAINT: Row(_C.INVALID_ARGUMENT, Detail.FIELDS),
    Reason.PROMPT_TOO_LONG: Row(_C.INVALID_ARGUMENT, Detail.FIELDS),
    Reason.NEVER_FITS: Row(_C.INVALID_ARGUMENT, Detail.FIELDS),
    Reason.TEMPLATE_REFUSED: Row(_C.INVALID_ARGUMENT, Detail.FIELDS),
    Reason.INVALID_MODEL: Row(_C.INVALID_ARGUMENT, Detail.FIELDS),
    Reason.MODEL_NOT_FOUND: Row(_C.NOT_FOUND, Detail.RESOURCE),
    Reason.SLOT_NOT_FOUND: Row(_C.NOT_FOUND, Detail.RESOURCE),
    Reason.REQUEST_NOT_FOUND: Row(_C.NOT_FOUND, Detail.RESOURCE),
    Reason.REQUEST_ID_IN_USE: Row(_C.ALREADY_EXISTS, Detail.RESOURCE),
    Reason.ENGINE_EXISTS: Row(_C.ALREADY_EXISTS, Detail.RESOURCE),
    Reason.DECODE_MODE_MISMATCH: Row(_C.FAILED_PRECONDITION, Detail.PRECONDITION),
    Reason.MODEL_DIGEST_MISMATCH: Row(_C.FAILED_PRECONDITION, Detail.PRECONDITION),
    Reason.SLOT_STATE: Row(_C.FAILED_PRECONDITION, Detail.PRECONDITION),
    Reason.NO_CHAT_TEMPLATE: Row(_C.FAILED_PRECONDITION, Detail.PRECONDITION),
    Reason.NO_TOKENIZER: Row(_C.FAILED_PRECONDITION, Detail.PRECONDITION),
    Reason.QUEUE_FULL: Row(_C.RESOURCE_EXHAUSTED, retry_delay_s=1.0),
    Reason.QUEUE_TIMEOUT: Row(_C.RESOURCE_EXHAUSTED, retry_delay_s=1.0),
    Reason.NO_FREE_SLOT: Row(_C.RESOURCE_EXHAUSTED, retry_delay_s=1.0),
    Reason.KV_EXHAUSTED: Row(_C.RESOURCE_EXHAUSTED, retry_delay_s=1.0),
    Reason.MEMORY: Row(_C.RESOURCE_EXHAUSTED),
    Reason.CLIENT_STALLED: Row(_C.RESOURCE_EXHAUSTED),
    Reason.TOO_MANY_CALLS: Row(_C.RESOURCE_EXHAUSTED, retry_delay_s=1.0),
    Reason.STALE_EPOCH: Row(_C.ABORTED),
    Reason.LEASE_LOST: Row(_C.ABORTED),
    Reason.LOADING: Row(_C.UNAVAILABLE, retry_delay_s=0.5),
    Reason.DRAINING: Row(_C.UNAVAILABLE, retry_delay_s=2.0),
    Reason.ENGINE_FAILED: Row(_C.UNAVAILABLE),
    Reason.COMPILER_UNAVAILABLE: Row(_C.UNAVAILABLE, retry_delay_s=1.0),
    Reason.RENDERER_UNAVAILABLE: Row(_C.UNAVAILABLE, retry_delay_s=1.0),
    Reason.TRUNCATED_MODEL: Row(_C.DATA_LOSS, Detail.RESOURCE),
    Reason.RESTORE_UNPROVEN: Row(_C.DATA_LOSS, Detail.RESOURCE),
    Reason.DEADLINE_EXCEEDED: Row(_C.DEADLINE_EXCEEDED),
    Reason.DEADLINE_UNREACHABLE: Row(_C.DEADLINE_EXCEEDED),
    Reason.CANCELLED: Row(_C.CANCELLED),
    Reason.UNAUTHENTICATED: Row(_C.UNAUTHENTICATED),
    Reason.PERMISSION_DENIED: Row(_C.PERMISSION_DENIED),
    Reason.FOREIGN_SLOT: Row(_C.PERMISSION_DENIED),
    Reason.NOT_IMPLEMENTED: Row(_C.UNIMPLEMENTED),
    Reason.UNSUPPORTED_MODEL: Row(_C.UNIMPLEMENTED),
    Reason.INTERNAL: Row(_C.INTERNAL),
    Reason.NON_FINITE_LOGITS: Row(_C.INTERNAL),
    Reason.DEVICE_FAULT: Row(_C.INTERNAL),
}


class ServiceError(Exception):
    """A call that fails, by its reason.

    Attributes:
        reason: decides the gRPC code and the kind of details; see TABLE.
        message: one line for people: what was wrong, what to do next.
        metadata: facts for programs, as error_reason.proto lists them for this reason.
        field: path of the field that is at fault, for BadRequest.
        resource: (type, name) of what is meant, for ResourceInfo.
        retry_delay_s: overrides the table's; None there and here: no RetryInfo.
        extra: further details: xllm.v1.Usage of a generation that had begun, xllm.v1.Plan of what does not fit.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        metadata: Mapping[str, object] | None = None,
        field: str = "",
        resource: tuple[str, str] | None = None,
        retry_delay_s: float | None = None,
        extra: Iterable[Message] = (),
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.metadata = {key: str(value) for key, value in (metadata or {}).items()}
        self.field = field
        self.resource = resource
        self.retry_delay_s = TABLE[reason].retry_delay_s if retry_delay_s is None else retry_delay_s
        self.extra = list(extra)

    def __str__(self) -> str:
        return self.message

    @property
    def code(self) -> grpc.StatusCode:
        """The gRPC status code."""
        return TABLE[self.reason].code

    def violations(self) -> list[tuple[str, str]]:
        """The fields at fault, each with what is wrong with it."""
        return [(self.field, self.message)] if self.field else []


class InvalidFieldError(ServiceError):
    """One field of a request, or several, cannot be used as they are."""

    def __init__(self, violations: list[tuple[str, str]]) -> None:
        """Describe violations: pairs of a field's path and what is wrong with it; at least one."""
        path, text = violations[0]
        more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
        super().__init__(Reason.INVALID_FIELD, f"{path}: {text}{more}", field=path)
        self._violations = violations

    def violations(self) -> list[tuple[str, str]]:
        """All of them."""
        return self._violations


def not_implemented(feature: str, remedy: str, field: str = "") -> ServiceError:
    """Refuse a feature that this build or model lacks, by its name."""
    message = f"{feature} is not offered by this server; {remedy}"
    metadata = {"feature": feature, "remedy": remedy} | ({"field": field} if field else {})
    return ServiceError(Reason.NOT_IMPLEMENTED, message, metadata=metadata)


def to_status(error: ServiceError) -> Any:
    """Return the grpc.Status of a failure: code, message, and details small enough for a trailer."""
    details: list[Message] = [
        error_details_pb2.ErrorInfo(
            domain=DOMAIN,
            reason=error.reason.value,
            metadata={key: _cut(value, _MAX_VALUE) for key, value in list(error.metadata.items())[:_MAX_METADATA]},
        )
    ]
    match TABLE[error.reason].detail:
        case Detail.FIELDS:
            violations = [
                error_details_pb2.BadRequest.FieldViolation(
                    field=_cut(path, _MAX_VALUE), description=_cut(text, _MAX_VALUE)
                )
                for path, text in error.violations()[:_MAX_VIOLATIONS]
            ]
            if violations:
                details.append(error_details_pb2.BadRequest(field_violations=violations))
        case Detail.RESOURCE if error.resource is not None:
            kind, name = error.resource
            description = _cut(error.message, _MAX_VALUE)
            details.append(
                error_details_pb2.ResourceInfo(
                    resource_type=kind, resource_name=_cut(name, _MAX_VALUE), description=description
                )
            )
        case Detail.PRECONDITION:
            violation = error_details_pb2.PreconditionFailure.Violation(
                type=error.reason.value, subject=DOMAIN, description=_cut(error.message, _MAX_VALUE)
            )
            details.append(error_details_pb2.PreconditionFailure(violations=[violation]))
        case _:
            pass
    if error.retry_delay_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(error.retry_delay_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    details += error.extra
    message = _cut(error.message, _MAX_MESSAGE)
    status = status_pb2.Status(code=error.code.value[0], message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        # note: ErrorInfo comes first and always fits; what is cut is what people read, never the reason.
        if status.ByteSize() + packed.ByteSize() <= _MAX_STATUS:
            status.details.append(packed)
    return rpc_status.to_status(status)


def _cut(text: str, limit: int) -> str:
    """Cut a long value, which came from a caller or a file, to what fits a trailer."""
    if len(text.encode("utf-8", "replace")) <= limit:
        return text
    return text.encode("utf-8", "replace")[: limit - 3].decode("utf-8", "ignore") + "..."
