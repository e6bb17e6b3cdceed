"""A call that computes something, from its arrival to its end: known by its id, ended from outside, and receipted."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import Any

import grpc

from xllm_service import orca, tracing
from xllm_service.admission import GenerationState, LiveGeneration
from xllm_service.errors import Reason, ServiceError
from xllm_service.interceptors import has_run_out, principal
from xllm_service.servicers.served import Served

_STATES = {
    grpc.StatusCode.OK: GenerationState.FINISHED,
    grpc.StatusCode.CANCELLED: GenerationState.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED: GenerationState.TIMED_OUT,
}


@contextlib.asynccontextmanager
async def live_call(
    served: Served, context: Any, *, request_id: str, model: str, fingerprint: bytes
) -> AsyncIterator[LiveGeneration]:
    """Register a call while the body runs, and keep its receipt.

    The body is cancelled when the client goes away or somebody ends the call; in the second case that one's reason is
    raised. Raises REQUEST_ID_IN_USE.

    Args:
        served: the server's insides.
        context: the call's.
        request_id: the caller's name for it; "" draws one.
        model: the engine that it runs on.
        fingerprint: equal for equal bodies.
    """
    task = asyncio.current_task()
    assert task is not None
    live = LiveGeneration(request_id or secrets.token_hex(16), principal.get(), fingerprint, task.cancel)
    live.receipt.model = model
    served.generations.add(live)
    is_over = False
    allowed_s = context.time_remaining()
    code, reason = grpc.StatusCode.INTERNAL, Reason.INTERNAL.value
    # note: grpc.aio cancels this task when the client goes away; should it miss that, this does not.
    context.add_done_callback(lambda _: None if is_over else task.cancel())
    try:
        yield live
        code, reason = grpc.StatusCode.OK, ""
    except asyncio.CancelledError:
        failure = live.failure or _why_cancelled(context, allowed_s)
        code, reason = failure.code, failure.reason.value
        if live.failure is None:
            raise
        task.uncancel()
        raise live.failure from None
    except ServiceError as error:
        code, reason = error.code, error.reason.value
        raise
    finally:
        is_over = True
        live.state = _STATES.get(code, GenerationState.FAILED)
        usage = live.receipt.usage
        orca.call_cost.set({"prompt_tokens": usage.num_prompt_tokens, "generated_tokens": usage.num_generated_tokens})
        served.generations.remove(live, code, reason)
        tracing.describe(live.receipt)


def _why_cancelled(context: Any, allowed_s: float | None) -> ServiceError:
    if has_run_out(context, allowed_s):
        return ServiceError(Reason.DEADLINE_EXCEEDED, "the call's deadline has passed")
    return ServiceError(Reason.CANCELLED, "the client has gone")
