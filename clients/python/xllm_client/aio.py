"""The client for asyncio: the twin of client.py, method for method."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, cast

import grpc
import grpc.aio
from google.protobuf.message import Message as ProtoMessage
from grpc_health.v1 import health_pb2, health_pb2_grpc

from xllm_client import request
from xllm_client.aio_slots import AdaptedAsyncCall, AsyncSlot
from xllm_client.channel import channel_settings
from xllm_client.errors import from_rpc_error
from xllm_client.events import Event, Result, ResultBuilder
from xllm_client.readiness import CHECK_TIMEOUT_S, POLL_S, is_transient, not_ready
from xllm_client.retry import RetryPolicy, time_left
from xllm_client.types import ChatOptions, DecodeMode, DecodeSlotOptions, GenerateOptions, Message, Prompt, Tls
from xllm_client.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    generation_pb2,
    generation_service_pb2,
    generation_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
    slot_pb2,
    slot_service_pb2,
    slot_service_pb2_grpc,
)

if TYPE_CHECKING:  # one class serves both kinds of channel; only the type checker tells them apart
    from xllm_client.v1.admin_service_pb2_grpc import AdminServiceAsyncStub
    from xllm_client.v1.generation_service_pb2_grpc import GenerationServiceAsyncStub
    from xllm_client.v1.model_service_pb2_grpc import ModelServiceAsyncStub
    from xllm_client.v1.slot_service_pb2_grpc import SlotServiceAsyncStub

_Reply = TypeVar("_Reply", bound=ProtoMessage)


class AsyncClient:
    """A connection to one server, for the event loop it is made in. Close it, or use it in `async with`.

    Args:
        endpoint: unix:PATH, unix:///PATH, HOST:PORT or [IPV6]:PORT. None: the user's default socket.
        token: Bearer token, sent with every call; over a network only with `tls`.
        tls: TLS settings; None connects in plain text.
        timeout_s: For every call that does not say its own; None: no deadline.
        retry: What is done about refusals.

    Every call raises a subclass of XllmError when it fails. Nothing connects before the first call.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        token: str | None = None,
        tls: Tls | None = None,
        timeout_s: float | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        settings = channel_settings(endpoint, token, tls)
        self.endpoint = settings.target
        self._metadata = settings.metadata
        self._timeout_s = timeout_s
        self._retry = retry if retry is not None else RetryPolicy()
        self._running: weakref.WeakSet[AsyncGeneration] = weakref.WeakSet()
        if settings.credentials is None:
            self.channel = grpc.aio.insecure_channel(settings.target, settings.options)
        else:
            self.channel = grpc.aio.secure_channel(settings.target, settings.credentials, settings.options)
        channel = cast("Any", self.channel)
        self._generation: GenerationServiceAsyncStub = cast(
            "Any", generation_service_pb2_grpc.GenerationServiceStub(channel)
        )
        self._model: ModelServiceAsyncStub = cast("Any", model_service_pb2_grpc.ModelServiceStub(channel))
        self._admin: AdminServiceAsyncStub = cast("Any", admin_service_pb2_grpc.AdminServiceStub(channel))
        self._health: Any = health_pb2_grpc.HealthStub(channel)
        # For the slot calls, which take and return the contract's messages; pass `metadata=client.metadata`.
        self.slots: SlotServiceAsyncStub = cast("Any", slot_service_pb2_grpc.SlotServiceStub(channel))

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What has to go with calls on the stubs themselves: the token."""
        return self._metadata

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncGeneration:
        """Continue a prompt, and yield events as they come."""
        return self._stream(request.generation_spec(prompt, options), options.get("timeout_s"))

    async def generate_once(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Result:
        """Continue a prompt, and return when all of it is there."""
        return await self._once(request.generation_spec(prompt, options), options.get("timeout_s"))

    def chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> AsyncGeneration:
        """Answer a conversation, and yield events as they come."""
        return self._stream(request.chat_spec(messages, options), options.get("timeout_s"))

    async def chat_once(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> Result:
        """Answer a conversation, and return when all of it is there."""
        return await self._once(request.chat_spec(messages, options), options.get("timeout_s"))

    async def estimate(
        self, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> generation_service_pb2.EstimateGenerationResponse:
        """Return what a generation would meet, without computing anything."""
        spec = request.generation_spec(prompt, options)
        call = generation_service_pb2.EstimateGenerationRequest(spec=spec)
        return await self._call(self._generation.EstimateGeneration, call, options.get("timeout_s"))

    async def cancel(self, request_id: str) -> None:
        """Stop a generation by its id; harmless when it has ended. Raises NotFoundError for an unknown one."""
        call = generation_service_pb2.CancelGenerationRequest(request_id=request_id)
        await self._call(self._generation.CancelGeneration, call)

    async def get_generation(self, request_id: str) -> generation_service_pb2.GenerationReceipt:
        """Return the state of a generation, or the receipt of one that ended some minutes ago at most."""
        call = generation_service_pb2.GetGenerationRequest(request_id=request_id)
        return (await self._call(self._generation.GetGeneration, call)).receipt

    async def tokenize(
        self,
        text: str,
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        parse_special: bool = False,
    ) -> list[int]:
        """Return the token ids of a text."""
        call = model_service_pb2.TokenizeRequest(model=model, text=text, parse_special=parse_special)
        if add_special_tokens is not None:
            call.add_special_tokens = add_special_tokens
        return list((await self._call(self._model.Tokenize, call)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", render_special: bool = False) -> str:
        """Return the text of token ids."""
        call = model_service_pb2.DetokenizeRequest(model=model, token_ids=token_ids, render_special=render_special)
        return (await self._call(self._model.Detokenize, call)).text

    async def render_chat(self, messages: Sequence[Message], *, model: str = "", **options: Any) -> str:
        """Return the prompt that a conversation becomes; options as the last four of ChatOptions."""
        chat = request.chat_message_list(messages, options)
        call = model_service_pb2.RenderChatRequest(model=model, chat=chat)
        return (await self._call(self._model.RenderChat, call)).text

    async def models(self) -> list[model_service_pb2.ModelSummary]:
        """Return the models served."""
        return list((await self._call(self._model.ListModels, model_service_pb2.ListModelsRequest())).models)

    async def get_model(self, model: str = "", *, include_metadata: bool = False) -> model_service_pb2.Model:
        """Return everything known about a model; "" is the server's only one."""
        call = model_service_pb2.GetModelRequest(model=model, include_metadata=include_metadata)
        return (await self._call(self._model.GetModel, call)).model

    async def acquire_slot(
        self,
        model: str = "",
        *,
        expected_digest: str = "",
        decode_mode: DecodeMode = DecodeMode.AUTO,
        slot_name: str = "",
        lease_s: float | None = None,
        max_wait_s: float = 0.0,
    ) -> AsyncSlot:
        """Own a free slot for `lease_s` seconds (None: the server's default), waiting for one up to `max_wait_s`."""
        call = request.acquire_request(model, expected_digest, decode_mode, slot_name, lease_s, max_wait_s)
        reply = await self._call(self.slots.AcquireSlot, call)
        return AsyncSlot(self, reply.ref, reply.slot)

    def decode_batch(self, slots: Sequence[AsyncSlot], **options: Unpack[DecodeSlotOptions]) -> AsyncGeneration:
        """Generate in several batched slots in lock-step; `output_index` of an event is the slot's place here."""
        call = request.decode_batch_request([slot.ref for slot in slots], options)
        return self._decode(self.slots.DecodeBatch, call, options.get("timeout_s"))

    async def list_slots(self, model: str = "") -> list[slot_pb2.Slot]:
        """Return every slot as it is now; "" is those of all models."""
        return list((await self._call(self.slots.ListSlots, slot_service_pb2.ListSlotsRequest(model=model))).slots)

    async def watch_slots(self, model: str = "") -> AsyncIterator[list[slot_pb2.Slot]]:
        """Yield every slot, then those that have changed, as they change; closing the iterator ends it."""
        call = self.slots.WatchSlots(slot_service_pb2.WatchSlotsRequest(model=model), metadata=self.metadata)
        try:
            async for reply in call:
                yield list(reply.slots)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.endpoint) from error
        finally:
            call.cancel()

    async def server_info(self) -> admin_service_pb2.GetServerInfoResponse:
        """Return the server's build, capabilities and limits."""
        return await self._call(self._admin.GetServerInfo, admin_service_pb2.GetServerInfoRequest())

    async def load(self, model: str = "") -> list[admin_service_pb2.EngineLoad]:
        """Return how busy each engine is; "" is all of them."""
        return list((await self._call(self._admin.GetLoad, admin_service_pb2.GetLoadRequest(model=model))).engines)

    async def wait_ready(self, timeout_s: float = 30.0, *, service: str = "") -> None:
        """Wait until the server's health is SERVING, also for one that has not started to listen.

        Raises UnavailableError, which says what was seen last, when `timeout_s` is over.
        """
        deadline = time.monotonic() + timeout_s
        seen = "no answer"
        while (left := deadline - time.monotonic()) > 0:
            try:
                reply = await self._health.Check(
                    health_pb2.HealthCheckRequest(service=service),
                    timeout=min(left, CHECK_TIMEOUT_S),
                    metadata=self._metadata,
                )
            except grpc.RpcError as error:
                failure = from_rpc_error(error, self.endpoint)
                if not is_transient(failure.code):
                    raise failure from error
                seen = str(failure)
            else:
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                seen = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
            await asyncio.sleep(max(0.0, min(POLL_S, deadline - time.monotonic())))
        raise not_ready(self.endpoint, timeout_s, seen)

    async def close(self) -> None:
        """End every call that runs and close the connection. Calling it again is harmless."""
        for generation in tuple(self._running):  # gRPC ends only those that a task is reading just now
            generation.close()
        await self.channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def _deadline(self, timeout_s: float | None) -> float | None:
        timeout = timeout_s if timeout_s is not None else self._timeout_s
        return time.monotonic() + timeout if timeout is not None else None

    def _timeout(self, timeout_s: float | None) -> float | None:
        return timeout_s if timeout_s is not None else self._timeout_s

    def _decode(self, method: Any, message: ProtoMessage, timeout_s: float | None) -> AsyncGeneration:
        def start(time_left_s: float | None) -> Any:
            call = method(message, timeout=time_left_s, metadata=self._metadata)
            return AdaptedAsyncCall(call, request.as_generation)

        generation = AsyncGeneration(start, self._retry, self._deadline(timeout_s), self.endpoint)
        self._running.add(generation)
        return generation

    def _stream(self, spec: generation_service_pb2.GenerationSpec, timeout_s: float | None) -> AsyncGeneration:
        call = generation_service_pb2.GenerateRequest(spec=spec)

        def start(time_left_s: float | None) -> Any:
            return self._generation.Generate(call, timeout=time_left_s, metadata=self._metadata)

        generation = AsyncGeneration(start, self._retry, self._deadline(timeout_s), self.endpoint)
        self._running.add(generation)
        return generation

    async def _once(self, spec: generation_service_pb2.GenerationSpec, timeout_s: float | None) -> Result:
        call = generation_service_pb2.GenerateOnceRequest(spec=spec)
        reply = await self._call(self._generation.GenerateOnce, call, timeout_s)
        return Result(reply.accepted, reply.outputs, reply.usage, reply.timings)

    async def _call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Any, _Reply],
        message: ProtoMessage,
        timeout_s: float | None = None,
    ) -> _Reply:
        """Make a unary call, with retries."""
        deadline = self._deadline(timeout_s)
        attempt = 1
        while True:
            try:
                return await method(message, timeout=time_left(deadline), metadata=self._metadata)
            except grpc.RpcError as error:
                failure = from_rpc_error(error, self.endpoint)
                delay = self._retry.delay_s(failure, attempt, time_left(deadline))
                if delay is None:
                    raise failure from error
            await asyncio.sleep(delay)
            attempt += 1


class AsyncGeneration(AsyncIterator[Event]):
    """A running generation: iterate over its events, or await `result`.

    The call starts at once. `close`, the end of an `async with` statement, cancelling the task that reads, and
    dropping the last reference (as a `break` out of an `async for` loop does) cancel it, and the server has its slot
    back within a step.
    """

    def __init__(
        self,
        start: Callable[[float | None], Any],
        retry: RetryPolicy,
        deadline: float | None,
        endpoint: str,
    ) -> None:
        self._start = start
        self._retry = retry
        self._deadline = deadline
        self._endpoint = endpoint
        self._attempt = 1
        self._builder = ResultBuilder()
        self._closed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._call = start(time_left(deadline))

    @property
    def accepted(self) -> generation_pb2.Accepted | None:
        """Effective parameters, token counts and request id; None before the first event."""
        return self._builder.accepted

    async def __anext__(self) -> Event:
        while not self._closed.is_set():
            try:
                message = await self._call.read()
            except grpc.RpcError as error:
                if self._closed.is_set():
                    break
                await self._again_or_raise(error)
                continue
            except asyncio.CancelledError:
                # note: gRPC raises this too when another task closed the call; only our own task's is passed on
                task = asyncio.current_task()
                if self._closed.is_set() and not (task is not None and task.cancelling()):
                    break
                raise
            if message is grpc.aio.EOF:
                break
            kind = message.WhichOneof("event")
            if kind is not None:  # an event of a newer contract is skipped
                self._builder.add(kind, message)
                return Event(kind, message)
        raise StopAsyncIteration

    async def result(self) -> Result:
        """Read what is left, and return the whole generation."""
        async for _ in self:
            pass
        return self._builder.result()

    def close(self) -> None:
        """Cancel what still runs. Iteration ends; calling it again is harmless."""
        self._closed.set()
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # note: the last reference may go in a garbage collection on any thread
        if hasattr(self, "_call") and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._call.cancel)

    async def _again_or_raise(self, error: grpc.RpcError) -> None:
        failure = from_rpc_error(error, self._endpoint, began=self.accepted is not None)
        left = time_left(self._deadline)
        delay = self._retry.delay_s(failure, self._attempt, left) if self.accepted is None else None
        if delay is None:
            raise failure from error
        try:
            await asyncio.wait_for(self._closed.wait(), delay)
        except TimeoutError:
            self._attempt += 1
            self._call = self._start(time_left(self._deadline))
