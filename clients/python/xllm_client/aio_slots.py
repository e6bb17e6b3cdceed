"""Slots for asyncio: the twin of slots.py, method for method."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import grpc
import grpc.aio

from xllm_client import request
from xllm_client.errors import from_rpc_error
from xllm_client.types import DecodeMode, DecodeSlotOptions, Prompt
from xllm_client.v1 import slot_pb2, slot_service_pb2

if TYPE_CHECKING:
    from xllm_client.aio import AsyncClient, AsyncGeneration


class AsyncSlot:
    """A slot that this client owns; made by `AsyncClient.acquire_slot`. The end of an `async with` releases it.

    Attributes:
        ref: what names this ownership to the calls on the contract's stub, its secret included.
        info: the slot as the latest of these calls saw it.
    """

    def __init__(self, client: AsyncClient, ref: slot_pb2.SlotRef, info: slot_pb2.Slot) -> None:
        """Take over what AcquireSlot returned."""
        self.ref = ref
        self.info = info
        self._client = client

    @property
    def decode_mode(self) -> DecodeMode:
        """The mode in effect, fixed when it was acquired."""
        return DecodeMode(self.info.decode_mode)

    async def renew(self, lease_s: float | None = None) -> None:
        """Let the lease end so many seconds from now; None: the server's default."""
        call = slot_service_pb2.RenewSlotRequest(ref=self.ref, ttl=request.optional_duration(lease_s))
        self.info = (await self._client._call(self._client.slots.RenewSlot, call)).slot

    async def refresh(self) -> slot_pb2.Slot:
        """Look at the slot again, and return it."""
        call = slot_service_pb2.GetSlotRequest(name=self.ref.name)
        self.info = (await self._client._call(self._client.slots.GetSlot, call)).slot
        return self.info

    async def prefill(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool | None = None,
        parse_special: bool = False,
        timeout_s: float | None = None,
    ) -> slot_service_pb2.PrefillFinished:
        """Compute a prompt into the slot, or append one; returns when it is in. Cancelling the task undoes it."""
        message = request.prefill_request(self.ref, prompt, add_special_tokens, parse_special)
        client = self._client
        call = client.slots.Prefill(message, timeout=client._timeout(timeout_s), metadata=client.metadata)
        try:
            async for progress in call:
                if progress.HasField("finished"):
                    finished = progress.finished
        except grpc.RpcError as error:
            raise from_rpc_error(error, client.endpoint) from error
        finally:
            call.cancel()
        self.info = finished.slot
        return finished

    def decode(self, **options: Unpack[DecodeSlotOptions]) -> AsyncGeneration:
        """Generate in the slot, by the API of its mode, and yield events as they come. It stays owned."""
        if self.decode_mode is DecodeMode.BATCHED:
            return self._client.decode_batch([self], **options)
        call = request.decode_slot_request(self.ref, options)
        return self._client._decode(self._client.slots.DecodeSlot, call, options.get("timeout_s"))

    async def fork(self, lease_s: float | None = None) -> AsyncSlot:
        """Own a further slot that continues from where this READY one is; the two share what they hold."""
        call = slot_service_pb2.ForkSlotRequest(ref=self.ref, ttl=request.optional_duration(lease_s))
        reply = await self._client._call(self._client.slots.ForkSlot, call)
        return AsyncSlot(self._client, reply.ref, reply.slot)

    async def release(self) -> None:
        """Give it back; what runs in it ends. Raises AbortedError when it was lost before."""
        call = slot_service_pb2.ReleaseSlotRequest(ref=self.ref)
        self.info = (await self._client._call(self._client.slots.ReleaseSlot, call)).slot

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.release()


class AdaptedAsyncCall:
    """A decode of slots as a generation's stream."""

    def __init__(self, call: Any, convert: Callable[[Any], Any]) -> None:
        """Convert each message of a running call."""
        self._call = call
        self._convert = convert

    async def read(self) -> Any:
        """Return the next message, or grpc.aio.EOF."""
        message = await self._call.read()
        return message if message is grpc.aio.EOF else self._convert(message)

    def cancel(self) -> bool:
        """Cancel the call."""
        return bool(self._call.cancel())
