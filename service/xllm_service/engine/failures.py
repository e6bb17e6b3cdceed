"""What goes wrong in the core, in the words of the contract: the one place where the two meet."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from cyengine.errors import XllmError
from cyengine.types import Status
from xllm_service.errors import Reason, ServiceError

_REASONS: Mapping[Status, Reason] = {
    Status.INVALID_ARGUMENT: Reason.INVALID_FIELD,
    Status.PROMPT_TOO_LONG: Reason.PROMPT_TOO_LONG,
    Status.NEVER_FITS: Reason.NEVER_FITS,
    Status.NOT_FOUND: Reason.MODEL_NOT_FOUND,
    Status.ALREADY_EXISTS: Reason.REQUEST_ID_IN_USE,
    Status.DECODE_MODE_MISMATCH: Reason.DECODE_MODE_MISMATCH,
    Status.SLOT_STATE: Reason.SLOT_STATE,
    Status.NO_TOKENIZER: Reason.NO_TOKENIZER,
    Status.NO_CHAT_TEMPLATE: Reason.NO_CHAT_TEMPLATE,
    Status.QUEUE_FULL: Reason.QUEUE_FULL,
    Status.QUEUE_TIMEOUT: Reason.QUEUE_TIMEOUT,
    Status.NO_FREE_SLOT: Reason.NO_FREE_SLOT,
    Status.KV_EXHAUSTED: Reason.KV_EXHAUSTED,
    Status.MEMORY: Reason.MEMORY,
    Status.STALE_EPOCH: Reason.STALE_EPOCH,
    Status.LEASE_LOST: Reason.LEASE_LOST,
    Status.PERMISSION_DENIED: Reason.FOREIGN_SLOT,
    Status.CANCELLED: Reason.CANCELLED,
    Status.DEADLINE_EXCEEDED: Reason.DEADLINE_EXCEEDED,
    Status.DEADLINE_UNREACHABLE: Reason.DEADLINE_UNREACHABLE,
    Status.MODEL_MALFORMED: Reason.INVALID_MODEL,
    Status.MODEL_TRUNCATED: Reason.TRUNCATED_MODEL,
    Status.MODEL_UNSUPPORTED: Reason.UNSUPPORTED_MODEL,
    Status.UNIMPLEMENTED: Reason.NOT_IMPLEMENTED,
    Status.NON_FINITE_LOGITS: Reason.NON_FINITE_LOGITS,
    Status.DEVICE: Reason.DEVICE_FAULT,
    Status.ENGINE_FAILED: Reason.ENGINE_FAILED,
    Status.DRAINING: Reason.DRAINING,
    Status.IO: Reason.MODEL_NOT_FOUND,
    Status.INTERNAL: Reason.INTERNAL,
}

# The core's names of fields, as the contract spells them.
_FIELD_PATHS = {
    "token_ids": "spec.token_ids.ids",
    "prompt": "spec.token_ids.ids",
    "temperature": "spec.sampling.temperature",
    "top_k": "spec.sampling.top_k",
    "top_p": "spec.sampling.top_p",
    "min_p": "spec.sampling.min_p",
    "repetition_penalty": "spec.sampling.repetition_penalty",
    "frequency_penalty": "spec.sampling.frequency_penalty",
    "presence_penalty": "spec.sampling.presence_penalty",
    "logit_bias": "spec.sampling.logit_bias",
    "logit_biases": "spec.sampling.logit_bias",
    "max_tokens": "spec.limits.max_tokens",
    "min_tokens": "spec.stop.min_tokens",
    "stop_strings": "spec.stop.strings",
    "stop_token_ids": "spec.stop.token_ids",
    "num_logprobs": "spec.output.top_logprobs",
    "priority": "spec.priority",
    "num_outputs": "spec.num_outputs",
}
# The same in sentences of the core, where the contract has another name.
_WORDS = {
    "logit_biases": "logit_bias",
    "max_queue_s": "max_queue_time",
    "max_duration_s": "the time allowed",  # also a deadline's
}
_METADATA_NAMES = {
    "num_tokens": "num_prompt_tokens",
    "blocks_needed": "num_blocks_needed",
    "blocks_total": "num_blocks_total",
    "blocks_free": "num_blocks_free",
}


def to_service_error(error: XllmError) -> ServiceError:
    """Return an error of the core as one of ours; the one place where the two meet."""
    return service_error(error.status, error.message, error.details)


def service_error(status: Status, message: str, details: Mapping[str, str]) -> ServiceError:
    """Return what the core said as an error of ours: its details become metadata, its fields those of the contract."""
    names = {**_METADATA_NAMES, "limit": "queue_limit" if status == Status.QUEUE_FULL else "max_seq_len"}
    metadata = {names.get(key, key): value for key, value in details.items() if key not in ("field", "index")}
    for word, ours in _WORDS.items():
        message = message.replace(word, ours)
    path = ""
    if name := details.get("field"):
        base, bracket, rest = name.partition("[")
        path = _FIELD_PATHS.get(base, base) + bracket + rest
        if "index" in details and not bracket:
            path += f"[{details['index']}]"
    failure = ServiceError(_REASONS.get(status, Reason.INTERNAL), message, metadata=metadata, field=path)
    if status is Status.KV_EXHAUSTED and _outgrows_the_pool(details):
        failure.retry_delay_s = None  # it never fits, whoever leaves
    return failure


def _outgrows_the_pool(details: Mapping[str, str]) -> bool:
    return int(details.get("blocks_needed", 0)) > int(details.get("blocks_total", 0))


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raise errors of the core, within, as ours."""
    try:
        yield
    except XllmError as error:
        raise to_service_error(error) from error
