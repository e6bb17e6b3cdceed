"""How a request and its failures look on either side of the core."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from cyengine.types import DecodeMode, FinishedEvent, Request, SamplingParams
from xllm_service import convert
from xllm_service.engine.failures import service_error
from xllm_service.engine.stream import Bounds
from xllm_service.errors import Reason, ServiceError
from xllm_service.validation import DecodeChoices


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Whose a prompt is, and how it uses the prefix cache.

    Attributes:
        salt: only prompts of equal salt share blocks.
        bypass: neither read from the cache nor leave anything in it.
        tenant: whose prompt it is; tenants take turns in the queue.
    """

    salt: bytes = b""
    bypass: bool = False
    tenant: int = 0

    @classmethod
    def of(cls, principal: str, salt: str, bypass: bool) -> CacheUse:
        """Return that of one caller: what one principal has sent is never told to another, whatever salts they use."""
        owner = principal.encode()
        tenant = int.from_bytes(hashlib.sha256(owner).digest()[:8], "big")
        return cls(b"%d:%b:%b" % (len(owner), owner, salt.encode()), bypass, tenant)


def core_request(
    choices: DecodeChoices, bounds: Bounds, prompt: Sequence[int] = (), cache: CacheUse | None = None
) -> Request:
    """Return a request as the core takes it; without a prompt for a decode of slots."""
    cache = cache or CacheUse()
    return Request(
        prompt=prompt,
        sampling=SamplingParams(
            temperature=choices.temperature,
            top_k=choices.top_k,
            top_p=choices.top_p,
            min_p=choices.min_p,
            repetition_penalty=choices.repetition_penalty,
            frequency_penalty=choices.frequency_penalty,
            presence_penalty=choices.presence_penalty,
            seed=choices.seed,
        ),
        max_tokens=choices.max_tokens or 0,
        min_tokens=choices.min_tokens,
        ignore_eos=choices.ignore_eos,
        num_logprobs=choices.top_logprobs,
        stop_strings=choices.stop_strings,
        stop_token_ids=choices.stop_token_ids,
        logit_bias=choices.logit_bias,
        decode_mode=DecodeMode(choices.decode_mode),
        priority=choices.priority,
        max_queue_s=choices.max_queue_s or 0.0,
        max_duration_s=bounds.seconds,
        cache_salt=cache.salt,
        bypass_cache=cache.bypass,
        is_constrained=choices.constrained is not None,
        tenant=cache.tenant,
    )


def failure_of(finished: FinishedEvent, was_accepted: bool) -> ServiceError:
    """Return why a request failed, with its usage where it had begun."""
    failure = service_error(finished.status, finished.message, finished.details)
    if was_accepted:
        failure.extra.append(
            convert.usage_message(finished.num_prompt_tokens, finished.num_cached_tokens, finished.num_generated_tokens)
        )
    return failure


def mode_mismatch(own: DecodeMode, wanted: DecodeMode, call: str) -> ServiceError:
    """Return the refusal of a call that contradicts the engine's mode, in the core's own words."""
    remedy = f"request {own.name} or AUTO, or create an engine in mode {wanted.name} or AUTO"
    return ServiceError(
        Reason.DECODE_MODE_MISMATCH,
        f"{call}: the engine decodes {own.name}, the call asks for {wanted.name}; {remedy}",
        metadata={"engine_mode": own.name, "requested_mode": wanted.name, "call": call, "remedy": remedy},
    )
