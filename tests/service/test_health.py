"""Health: the truth about the step loop, to Check and to every watcher."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.service.conftest import Serve
from tests.service.fake_engine import FakeEngine
from xllm_client import AsyncClient
from xllm_service.app import Server

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def stub(client: AsyncClient) -> Any:
    return health_pb2_grpc.HealthStub(client.channel)


async def status_of(client: AsyncClient, service: str = "") -> int:
    return int((await stub(client).Check(health_pb2.HealthCheckRequest(service=service))).status)


@pytest.mark.parametrize(
    "name", ["", "xllm.v1.GenerationService", "xllm.v1.ModelService", "xllm.v1.AdminService", "fake"]
)
async def test_the_process_the_services_and_the_model_have_names(client: AsyncClient, name: str) -> None:
    assert await status_of(client, name) == SERVING


async def test_an_unknown_name_is_not_found_and_can_be_watched(client: AsyncClient) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        await status_of(client, "other")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watch = stub(client).Watch(health_pb2.HealthCheckRequest(service="other"))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()


async def test_every_watcher_sees_every_change_whoever_leaves(
    client: AsyncClient, server: Server, engine: FakeEngine
) -> None:
    watches = [stub(client).Watch(health_pb2.HealthCheckRequest()) for _ in range(3)]
    assert [(await watch.read()).status for watch in watches] == [SERVING] * 3
    watches[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await watches[0].read()
    for has_failed, status in ((True, NOT_SERVING), (False, SERVING)):
        engine.has_failed = has_failed
        server.health.look()
        assert [(await watch.read()).status for watch in watches[1:]] == [status] * 2
    for watch in watches[1:]:
        watch.cancel()


@pytest.mark.parametrize("fault", [{"heartbeat_age_s": 60.0}, {"has_failed": True}])
async def test_an_engine_that_stands_still_is_told_and_so_is_its_return(
    client: AsyncClient, engine: FakeEngine, fault: dict[str, Any]
) -> None:
    watch = stub(client).Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == SERVING
    before = {name: getattr(engine, name) for name in fault}
    for name, value in fault.items():
        setattr(engine, name, value)
    async with asyncio.timeout(5):
        assert (await watch.read()).status == NOT_SERVING
    for name, value in before.items():
        setattr(engine, name, value)
    assert (await watch.read()).status == SERVING
    watch.cancel()


async def test_health_answers_while_every_slot_is_taken(serve: Serve, engine: FakeEngine) -> None:
    async with serve(max_concurrent_calls=1) as (_, client):
        call = client.generate("x")
        assert await status_of(client) == SERVING
        call.close()


async def test_a_watcher_does_not_hold_up_the_end(client: AsyncClient, server: Server) -> None:
    watch = stub(client).Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == SERVING
    await server.stop()
    assert (await watch.read()).status == NOT_SERVING
    with pytest.raises(grpc.RpcError) as caught:
        await watch.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
