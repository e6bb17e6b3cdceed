"""The slot calls for tests: our errors, plain arguments, and streams read to where a test wants them."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from xllm_client import AsyncClient, DecodeMode, XllmError
from xllm_client.errors import from_rpc_error
from xllm_client.v1 import slot_service_pb2


class Slots:
    """The slot calls of one client, with our errors and plain arguments."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client

    async def _unary(self, method: str, request: Any) -> Any:
        return await self.client._call(getattr(self.client.slots, method), request)

    async def acquire(self, **fields: Any) -> tuple[Any, Any]:
        reply = await self._unary("AcquireSlot", slot_service_pb2.AcquireSlotRequest(**fields))
        return reply.ref, reply.slot

    async def renew(self, ref: Any, seconds: int | None = None) -> Any:
        ttl = None if seconds is None else {"seconds": seconds}
        return (await self._unary("RenewSlot", slot_service_pb2.RenewSlotRequest(ref=ref, ttl=ttl))).slot

    async def release(self, ref: Any) -> Any:
        return (await self._unary("ReleaseSlot", slot_service_pb2.ReleaseSlotRequest(ref=ref))).slot

    async def get(self, name: str) -> Any:
        return (await self._unary("GetSlot", slot_service_pb2.GetSlotRequest(name=name))).slot

    async def every(self, model: str = "") -> list[Any]:
        return list((await self._unary("ListSlots", slot_service_pb2.ListSlotsRequest(model=model))).slots)

    def prefill_call(self, ref: Any, text: str = "hello", **fields: Any) -> Any:
        if not {"token_ids", "chat"} & fields.keys():
            fields["text"] = text
        request = slot_service_pb2.PrefillRequest(ref=ref, **fields)
        return self.client.slots.Prefill(request, timeout=20, metadata=self.client.metadata)

    async def prefill(self, ref: Any, text: str = "hello", **fields: Any) -> list[Any]:
        return await events(self.prefill_call(ref, text, **fields))

    def decode_call(self, ref: Any, max_tokens: int = 4, timeout: float = 20, **options: Any) -> Any:
        options.setdefault("limits", {"max_tokens": max_tokens})
        request = slot_service_pb2.DecodeSlotRequest(ref=ref, options=options)
        return self.client.slots.DecodeSlot(request, timeout=timeout, metadata=self.client.metadata)

    async def decode(self, ref: Any, max_tokens: int = 4, **options: Any) -> list[Any]:
        return await events(self.decode_call(ref, max_tokens, **options))

    def batch_call(self, refs: Any, max_tokens: int = 4, timeout: float = 20, **options: Any) -> Any:
        options.setdefault("limits", {"max_tokens": max_tokens})
        entries = [{"ref": ref, "options": options} for ref in refs]
        request = slot_service_pb2.DecodeBatchRequest(entries=entries)
        return self.client.slots.DecodeBatch(request, timeout=timeout, metadata=self.client.metadata)

    async def batch(self, refs: Any, max_tokens: int = 4, **options: Any) -> list[Any]:
        return await events(self.batch_call(refs, max_tokens, **options))

    async def any_decode(self, ref: Any, mode: DecodeMode, max_tokens: int = 4) -> list[Any]:
        return await (self.decode(ref, max_tokens) if mode is DecodeMode.PER_SLOT else self.batch([ref], max_tokens))

    def any_decode_call(self, ref: Any, mode: DecodeMode, **fields: Any) -> Any:
        return self.decode_call(ref, **fields) if mode is DecodeMode.PER_SLOT else self.batch_call([ref], **fields)


async def events(call: Any) -> list[Any]:
    """Read a stream to its end; raises our errors."""
    try:
        found = [message async for message in call]
    except grpc.RpcError as error:
        raise from_rpc_error(error, "") from error
    assert [message.sequence for message in found] == list(range(len(found)))
    return found


async def read(call: Any, kind: str) -> Any:
    """Read a stream up to the next event of a kind."""
    while True:
        message = await call.read()
        assert message is not grpc.aio.EOF
        if message.WhichOneof("event") == kind:
            return getattr(message, kind)


async def failure(work: Any) -> XllmError:
    with pytest.raises(XllmError) as caught:
        await work
    return caught.value


def kinds(found: list[Any]) -> list[str]:
    return [message.WhichOneof("event") for message in found]


def text_of(found: list[Any], index: int = 0) -> str:
    return "".join(message.delta.text for message in found if message.delta.output_index == index)


async def events_after(call: Any) -> None:
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.RpcError as error:
        raise from_rpc_error(error, "") from error
