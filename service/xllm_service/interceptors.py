"""What happens around every call: credentials, bytes that cannot be read, the server's phase, errors, counting.

One interceptor wraps every method, also those that do not exist, so nothing gets past it: it denies by default.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any, NoReturn

import grpc
import grpc.aio

from xllm_service import orca
from xllm_service.admission import Gate
from xllm_service.errors import Reason, ServiceError, not_implemented, to_status
from xllm_service.logs import facts, get_logger
from xllm_service.metrics import Metrics
from xllm_service.tracing import Call, Tracing

_log = get_logger("calls")

# Who the call is from: "" where the server knows no principals.
principal: ContextVar[str] = ContextVar("principal", default="")

_OURS = "/xllm.v1."
# Answered whatever the server's phase: they describe it, or end work instead of beginning it.
_ALWAYS = frozenset(
    (
        "/xllm.v1.GenerationService/CancelGeneration",
        "/xllm.v1.GenerationService/GetGeneration",
        "/xllm.v1.ModelService/ListModels",
        "/xllm.v1.SlotService/RenewSlot",
        "/xllm.v1.SlotService/GetSlot",
        "/xllm.v1.SlotService/ListSlots",
        "/xllm.v1.SlotService/ReleaseSlot",
    )
)
# Between a client's clock and ours, for the same deadline: at least so long, or this share of the whole time.
_CLOCK_S = 0.05
_CLOCK_SHARE = 0.1
_ADMIN = "/xllm.v1.AdminService/"
_OPERATORS = frozenset(f"{_ADMIN}{name}" for name in ("CreateEngine", "DestroyEngine", "Drain"))


class _Malformed:
    """Stands for request bytes that are no valid message."""

    def __init__(self, problem: str) -> None:
        self.problem = problem


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every call of a server.

    Args:
        gate: the server's phase and its limit of open calls.
        metrics: where calls are counted.
        tokens: bearer tokens; a call without one of them is UNAUTHENTICATED. Empty: no token is asked for.
        admin_tokens: more of them, whose callers alone may make and end engines and drain. Empty: everybody let in may.
        engines: statistics of the engines, for the load report in a call's trailer; None: there is none.
        tracing: what makes spans of calls; None: nothing does.
    """

    def __init__(
        self,
        gate: Gate,
        metrics: Metrics,
        tokens: tuple[str, ...] = (),
        admin_tokens: tuple[str, ...] = (),
        *,
        engines: Callable[[], Mapping[str, Any]] | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._engines = engines
        self._tracing = tracing
        self._gate = gate
        self._metrics = metrics
        self._tokens = {f"token-{index}": token.encode() for index, token in enumerate(tokens)}
        self._admins = {f"admin-{index}": token.encode() for index, token in enumerate(admin_tokens)}
        self._tokens |= self._admins

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the wrapped handler of a call; for a call that is denied, a handler that says so."""
        method = handler_call_details.method
        caller = self._authenticate(handler_call_details.invocation_metadata)
        if caller is None:
            return _denial(
                ServiceError(Reason.UNAUTHENTICATED, "send `authorization: Bearer TOKEN` with a token of this server")
            )
        handler = await continuation(handler_call_details)
        return None if handler is None else self._wrap(method, caller, handler)

    def _authenticate(self, metadata: Any) -> str | None:
        """Return the caller's name, "" where none is asked for, None for one who is not let in."""
        if not self._tokens:
            return ""
        for key, value in metadata or ():
            if key != "authorization":
                continue
            scheme, _, token = value.partition(" ") if isinstance(value, str) else ("", "", "")
            if scheme.lower() != "bearer":
                continue
            given = token.strip().encode("utf-8", "replace")
            # Every token is compared, so that the time taken tells nothing.
            matches = [name for name, known in self._tokens.items() if hmac.compare_digest(given, known)]
            if matches:
                return matches[-1]
        return None

    def _wrap(self, method: str, caller: str, handler: Any) -> Any:
        async def behaviour(request: Any, context: Any) -> Any:
            if self._tracing is None:
                return await self._run(method, caller, handler, request, context)
            with self._tracing.call(method, context.invocation_metadata()) as span:
                return await self._run(method, caller, handler, request, context, span)

        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[(handler.request_streaming, handler.response_streaming)]
        return make(
            behaviour,
            request_deserializer=_tolerant(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    async def _run(
        self, method: str, caller: str, handler: Any, request: Any, context: Any, span: Call | None = None
    ) -> Any:
        """Run one call, and end it with a status of ours however it fails."""
        principal.set(caller or _certificate_name(context))
        start = time.monotonic()
        allowed_s = context.time_remaining()
        code = "CANCELLED"  # what is left when the client goes away
        is_counted = False
        is_work = not method.startswith(_ADMIN) and method not in _ALWAYS
        try:
            if method.startswith(_OURS):
                self._gate.enter(is_work=is_work)
                is_counted = True
                if is_work:
                    self._gate.check()
            if method in _OPERATORS and self._admins and caller not in self._admins:
                raise ServiceError(
                    Reason.PERMISSION_DENIED, f"{method.rpartition('/')[2]} needs a token of --admin-token-file"
                )
            inner = _behaviour_of(handler)
            result = inner(_checked(request) if not handler.request_streaming else _checked_all(request), context)
            if inspect.isasyncgen(result):
                try:
                    async for message in result:
                        await context.write(message)
                finally:
                    await result.aclose()
                reply = None
            else:
                reply = await result if inspect.isawaitable(result) else result
            code = "OK"
            context.set_trailing_metadata(self._load_report())
            return reply
        except ServiceError as error:
            code = error.code.name
            self._metrics.failures.labels(error.reason.value).inc()
            _log_failure(method, error)
            await _abort(context, error, self._load_report())
        except NotImplementedError:
            code = "UNIMPLEMENTED"
            name = method.rpartition("/")[2]
            await _abort(context, not_implemented(name, "see the capabilities in GetServerInfo"))
        except asyncio.CancelledError:
            if has_run_out(context, allowed_s):
                code = "DEADLINE_EXCEEDED"
            raise
        except grpc.aio.AbortError:
            raise
        except Exception:
            if _is_gone(context):
                return None  # writing failed because nobody is there any more
            code = "INTERNAL"
            # note: the text stays here; what goes out names neither code nor paths.
            _log.exception("%s failed", method)
            await _abort(
                context, ServiceError(Reason.INTERNAL, "an error of the server's own; its log has the details")
            )
        finally:
            if is_counted:
                self._gate.leave(is_work=is_work)
            if span is not None:
                span.end(code, grpc.StatusCode[code].value[0])
            self._metrics.calls.labels(method.lstrip("/"), code).inc()
            _log.debug("call ended", extra=facts(method=method, code=code, seconds=round(time.monotonic() - start, 4)))

    def _load_report(self) -> tuple[tuple[str, bytes], ...]:
        """Return the trailer that tells a load balancer of what a call took and how busy its engines are."""
        cost = orca.call_cost.get()
        if not cost or self._engines is None:
            return ()
        return ((orca.TRAILER, orca.report(self._engines(), cost)),)


def has_run_out(context: Any, allowed_s: float | None) -> bool:
    """Tell a call that was cancelled because its deadline has passed from one whose client has gone.

    Args:
        context: the call's.
        allowed_s: what its time_remaining() was when it arrived.
    """
    # note: a client's own clock runs out before ours does, by the time that its request took to come here, and its
    # cancel is the first that is heard of it.
    left = context.time_remaining()
    return left is not None and left <= max(_CLOCK_S, _CLOCK_SHARE * (allowed_s or 0.0))


def _behaviour_of(handler: Any) -> Callable[[Any, Any], Any]:
    behaviour: Callable[[Any, Any], Any] = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    return behaviour


def _tolerant(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Let bytes that are no message reach the handler: an exception here would end the call as UNKNOWN."""
    if deserializer is None:
        return None

    def deserialize(data: bytes) -> Any:
        try:
            return deserializer(data)
        except Exception as error:
            return _Malformed(str(error))

    return deserialize


def _checked(request: Any) -> Any:
    if isinstance(request, _Malformed):
        raise ServiceError(
            Reason.MALFORMED_REQUEST,
            "the request's bytes are not a valid message: wrong wire format, or text that is not UTF-8",
            metadata={"problem": request.problem},
        )
    return request


async def _checked_all(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)


def _denial(error: ServiceError) -> Any:
    async def behaviour(_requests: Any, context: Any) -> None:
        await _abort(context, error)

    # note: this form takes a call of any kind, and reads nothing of it.
    return grpc.stream_stream_rpc_method_handler(behaviour)


async def _abort(context: Any, error: ServiceError, trailer: tuple[tuple[str, bytes], ...] = ()) -> NoReturn:
    status = to_status(error)
    await context.abort(status.code, status.details, (*status.trailing_metadata, *trailer))
    raise AssertionError("abort always raises")


def _certificate_name(context: Any) -> str:
    """Return the name in the client's certificate; "" without one.

    A certificate without a common name has its first alternative name, or else its own digest, so that two clients who
    have shown certificates are never taken for one.
    """
    shown = context.auth_context()
    for key in ("x509_common_name", "x509_subject_alternative_name"):
        for name in shown.get(key, ()):
            if name:
                return bytes(name).decode("utf-8", "replace")
    whole = shown.get("x509_pem_cert", ())
    return f"sha256:{hashlib.sha256(bytes(whole[0])).hexdigest()}" if whole else ""


def _is_gone(context: Any) -> bool:
    return bool(context.cancelled() or context.done())


def _log_failure(method: str, error: ServiceError) -> None:
    if error.reason in (Reason.INTERNAL, Reason.ENGINE_FAILED, Reason.DEVICE_FAULT, Reason.NON_FINITE_LOGITS):
        _log.error("%s", error.message, extra=facts(method=method, reason=error.reason.value))
    else:
        # The message may quote a request, so only the reason is logged.
        _log.info("refused", extra=facts(method=method, reason=error.reason.value))
