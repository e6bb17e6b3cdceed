"""From an exception to the one line that a user reads: what is wrong, and what to do next."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from xllm_service.config import ConfigError
from xllm_service.errors import ServiceError
from xllm_service.models import ModelFetchError, ModelNameError

# What to do about a failure whose message does not say so itself; by reason, of a server's calls and of this process.
_REMEDIES: Mapping[str, str] = {
    "CANCELLED": "somebody cancelled it; try again",
    "CLIENT_STALLED": "read the output as it comes",
    "DEADLINE_EXCEEDED": "allow more time, or ask for less",
    "DEVICE_FAULT": "look at the system's log, or use --backend cpu",
    "ENGINE_FAILED": "restart it",
    "INVALID_MODEL": "the file is damaged or no GGUF model; fetch it again",
    "MEMORY": "lower --max-slots, --max-seq-len or --kv-memory, or use a smaller model; `xllm inspect` shows the Plan",
    "MODEL_NOT_FOUND": "check the path or the name",
    "NEVER_FITS": "shorten it, or give the engine more --kv-memory",
    "NO_CHAT_TEMPLATE": "leave the conversation's form out: `xllm generate PROMPT` without --chat",
    "NO_TOKENIZER": "use a file with a tokenizer; of text this one can read nothing",
    "PERMISSION_DENIED": "use another token",
    "PROMPT_TOO_LONG": "shorten it, or raise --max-seq-len",
    "TRUNCATED_MODEL": "the file ends early; fetch it again",
    "UNAUTHENTICATED": "give the server's token with --token-file",
    "UNSUPPORTED_MODEL": "use a model that this build supports; the README lists them",
}


# How settings are called in the messages of the engine, which knows no command line.
_SETTING = re.compile(
    r"\b(?:max_seq_len|kv_memory|kv_type|memory_limit|max_slots|prefill_chunk|block_size|max_queue|decode_mode)\b"
)
_WORDS = {"the flag that allows more gives": "--allow-long-context allows more, with"}


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
    if isinstance(error, ServiceError | XllmError):
        remedy = error.metadata.get("remedy") or _REMEDIES.get(error.reason, "")
        if not remedy and error.retry_delay_s is not None:
            remedy = f"try again in {error.retry_delay_s:g} s"
        message = _one_line(error)
        if isinstance(error, ServiceError):  # of this process: the user has the flags at hand
            message = _with_flags(message)
        if remedy and "; " not in message:  # what follows a semicolon is the remedy, in all our messages
            message += f"; {remedy}"
        return Complaint(message, is_usage=error.reason == "INVALID_FIELD")
    if isinstance(error, OSError):
        return Complaint(f"{_one_line(error)}; check the path and its permissions")
    return Complaint(
        f"internal error: {type(error).__name__}: {_one_line(error)}; please report it with what "
        "`xllm --traceback` and the same command print"
    )


def _with_flags(message: str) -> str:
    """Name settings as this command line spells them."""
    for words, flag in _WORDS.items():
        message = message.replace(words, flag)
    return _SETTING.sub(lambda match: f"--{match[0].replace('_', '-')}", message)


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
