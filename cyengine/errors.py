"""Typed errors, one class for each status of the core that a caller may want to tell apart."""

from __future__ import annotations

from collections.abc import Mapping

from cyengine.types import Status


class XllmError(Exception):
    """A failure of the core.

    Attributes:
        status: the reason, by the numbers of ``xllm_status``.
        message: one line that names the thing, what was expected and what was found.
        details: facts for programs, such as ``field`` or ``bytes_needed``.
    """

    status: Status = Status.INTERNAL

    def __init__(self, message: str, status: Status | None = None, details: Mapping[str, str] | None = None) -> None:
        """Describe a failure; `status` defaults to the class's own."""
        super().__init__(message)
        self.message = message
        self.status = type(self).status if status is None else status
        self.details = dict(details or {})


class InvalidArgumentError(XllmError, ValueError):
    """A field is wrong; ``details["field"]`` names it."""

    status = Status.INVALID_ARGUMENT


class PromptTooLongError(InvalidArgumentError):
    """The prompt leaves no room in max_seq_len."""

    status = Status.PROMPT_TOO_LONG


class NeverFitsError(InvalidArgumentError):
    """The request would not fit an empty KV pool."""

    status = Status.NEVER_FITS


class NotFoundError(XllmError, LookupError):
    """No such file, request or slot."""

    status = Status.NOT_FOUND


class AlreadyExistsError(XllmError):
    """The id is in use."""

    status = Status.ALREADY_EXISTS


class DecodeModeMismatchError(XllmError):
    """The engine or slot decodes the other way; details: engine_mode, requested_mode, call, remedy."""

    status = Status.DECODE_MODE_MISMATCH


class SlotStateError(XllmError):
    """The call is not allowed in the slot's state."""

    status = Status.SLOT_STATE


class NoTokenizerError(XllmError):
    """Token ids work with this model, text does not."""

    status = Status.NO_TOKENIZER


class NoChatTemplateError(XllmError):
    """The model has no usable chat template."""

    status = Status.NO_CHAT_TEMPLATE


class ResourceExhaustedError(XllmError):
    """Something is used up; waiting may help."""


class QueueFullError(ResourceExhaustedError):
    """Nothing was queued; retry later."""

    status = Status.QUEUE_FULL


class QueueTimeoutError(ResourceExhaustedError):
    """The request waited longer than it allowed."""

    status = Status.QUEUE_TIMEOUT


class NoFreeSlotError(ResourceExhaustedError):
    """All slots are taken."""

    status = Status.NO_FREE_SLOT


class KvExhaustedError(ResourceExhaustedError):
    """The KV pool is used up."""

    status = Status.KV_EXHAUSTED


class MemoryLimitError(XllmError, MemoryError):
    """Does not fit in memory; details: bytes_needed, bytes_free, remedy."""

    status = Status.MEMORY


class StaleEpochError(XllmError):
    """The slot changed hands."""

    status = Status.STALE_EPOCH


class LeaseLostError(XllmError):
    """The slot's lease ran out."""

    status = Status.LEASE_LOST


class PermissionDeniedError(XllmError, PermissionError):
    """The slot belongs to someone else."""

    status = Status.PERMISSION_DENIED


class CancelledError(XllmError):
    """The request was cancelled."""

    status = Status.CANCELLED


class DeadlineExceededError(XllmError, TimeoutError):
    """The time allowed is over."""

    status = Status.DEADLINE_EXCEEDED


class DeadlineUnreachableError(DeadlineExceededError):
    """Refused before it began: its time would be over first; details: estimated_wait_s, max_duration_s."""

    status = Status.DEADLINE_UNREACHABLE


class ModelError(XllmError):
    """The model file was refused; the message names the key or tensor and the byte offset."""


class ModelMalformedError(ModelError):
    """The file contradicts its format."""

    status = Status.MODEL_MALFORMED


class ModelTruncatedError(ModelError):
    """The file ends early."""

    status = Status.MODEL_TRUNCATED


class ModelUnsupportedError(ModelError):
    """Version, architecture, tensor type or tokenizer unknown to this build."""

    status = Status.MODEL_UNSUPPORTED


class UnimplementedError(XllmError, NotImplementedError):
    """This build, device or model lacks it."""

    status = Status.UNIMPLEMENTED


class NonFiniteLogitsError(XllmError):
    """A row of logits held NaN or infinity; that request ended."""

    status = Status.NON_FINITE_LOGITS


class DeviceError(XllmError):
    """Driver or device fault."""

    status = Status.DEVICE


class EngineFailedError(XllmError):
    """The step loop has stopped; close the engine and create another."""

    status = Status.ENGINE_FAILED


class DrainingError(XllmError):
    """No new work is taken."""

    status = Status.DRAINING


class IoError(XllmError, OSError):
    """The operating system refused."""

    status = Status.IO


class InternalError(XllmError):
    """A broken invariant of the library."""

    status = Status.INTERNAL


def _all_subclasses(cls: type[XllmError]) -> list[type[XllmError]]:
    found: list[type[XllmError]] = []
    for sub in cls.__subclasses__():
        found += [sub, *_all_subclasses(sub)]
    return found


_BY_STATUS = {cls.status: cls for cls in _all_subclasses(XllmError) if "status" in vars(cls)}


def error_from_status(status: int, message: str, details: Mapping[str, str] | None = None) -> XllmError:
    """The typed error for a status of the core; the one place where the two meet."""
    try:
        known = Status(status)
    except ValueError:
        return InternalError(f"unknown status {status}: {message}", details=details)
    return _BY_STATUS.get(known, InternalError)(message, known, details)
