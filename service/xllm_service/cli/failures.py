"""From an exception to the one line that a user reads: what is wrong, and what to do next."""

from __future__ import annotations

from dataclasses import dataclass

from xllm_service.config import ConfigError
from xllm_service.models import ModelFetchError, ModelNameError


class UsageError(Exception):
    """The arguments contradict each other, or one of them cannot be read."""


class Failure(Exception):
    """A verb could not do its work; the message says what to do next."""


@dataclass(frozen=True)
class Complaint:
    """One line for the user; `is_usage`: what was typed is wrong, not what happened."""

    message: str
    is_usage: bool = False


def describe(error: Exception) -> Complaint:
    """Return what to tell the user about any exception that a verb let through."""
    from xllm_client import XllmError

    if isinstance(error, UsageError | ConfigError):
        return Complaint(_one_line(error), is_usage=True)
    if isinstance(error, Failure | ModelNameError | ModelFetchError):
        return Complaint(_one_line(error))
    if isinstance(error, XllmError):
        return _of_call(error)
    if isinstance(error, OSError):
        return Complaint(f"{_one_line(error)}; check the path and its permissions")
    return Complaint(
        f"internal error: {type(error).__name__}: {_one_line(error)}; please report it with the output of "
        "the same command after `xllm --traceback`"
    )


def _of_call(error: object) -> Complaint:
    """Describe a refused or broken call; a wrong field of the request is a wrong flag."""
    from xllm_client import XllmError

    assert isinstance(error, XllmError)
    message = _one_line(error)
    if remedy := error.metadata.get("remedy"):
        message += f"; {remedy}"
    elif error.retry_delay_s is not None:
        message += f"; try again in {error.retry_delay_s:g} s"
    return Complaint(message, is_usage=error.reason == "INVALID_FIELD")


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
