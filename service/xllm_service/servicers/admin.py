"""AdminService: what the server is, how busy, its engines and its end."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path
from typing import Any

from xllm_client.v1 import admin_service_pb2, admin_service_pb2_grpc
from xllm_service import config as settings
from xllm_service import convert
from xllm_service.admission import RECEIPT_TTL_S
from xllm_service.commit import find_commit
from xllm_service.constraints import MAX_CONSTRAINT_BYTES
from xllm_service.engine import DecodeMode, build_id, version
from xllm_service.engine_request import find_model, validate_engine, validate_grace
from xllm_service.errors import InvalidFieldError, Reason, ServiceError
from xllm_service.servicers.model import describe
from xllm_service.servicers.roster import Hosted
from xllm_service.servicers.served import SCHEMA_REVISION, Served

_POLL_S = 0.02  # between looks at what still runs

_MODE_CAPABILITIES = {
    DecodeMode.BATCHED: admin_service_pb2.CAPABILITY_DECODE_BATCHED,
    DecodeMode.PER_SLOT: admin_service_pb2.CAPABILITY_DECODE_PER_SLOT,
}
_CAPABILITIES = (
    admin_service_pb2.CAPABILITY_GENERATE,
    admin_service_pb2.CAPABILITY_RECEIPTS,
    admin_service_pb2.CAPABILITY_ESTIMATE,
    admin_service_pb2.CAPABILITY_SLOTS,
    admin_service_pb2.CAPABILITY_FORK_SLOT,
    admin_service_pb2.CAPABILITY_WATCH_SLOTS,
    admin_service_pb2.CAPABILITY_CHAT,
    admin_service_pb2.CAPABILITY_TOOL_CALLS,
    admin_service_pb2.CAPABILITY_REASONING,
    admin_service_pb2.CAPABILITY_STOP,
    admin_service_pb2.CAPABILITY_LOGIT_BIAS,
    admin_service_pb2.CAPABILITY_LOGPROBS,
    admin_service_pb2.CAPABILITY_MULTIPLE_OUTPUTS,
    admin_service_pb2.CAPABILITY_PREFIX_CACHE,
    admin_service_pb2.CAPABILITY_PRIORITY,
    admin_service_pb2.CAPABILITY_CONSTRAINTS,
    admin_service_pb2.CAPABILITY_ENGINES,
    admin_service_pb2.CAPABILITY_LOAD,
    admin_service_pb2.CAPABILITY_DRAIN,
)


class AdminServicer(admin_service_pb2_grpc.AdminServiceServicer):
    """Answers in every phase, from snapshots; makes and ends engines, and begins the server's end."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._commit = find_commit() or build_id

    async def GetServerInfo(
        self, request: admin_service_pb2.GetServerInfoRequest, context: Any
    ) -> admin_service_pb2.GetServerInfoResponse:
        """Build, capabilities and limits."""
        served = self._served
        reply = admin_service_pb2.GetServerInfoResponse(
            version=version,
            commit=self._commit,
            schema_revision=SCHEMA_REVISION,
            capabilities=_CAPABILITIES,
            limits=self._limits(),
            models=[hosted.name for hosted in served.roster],
            start_time=convert.timestamp(served.start_time),
            is_draining=served.is_draining,
        )
        modes = set[DecodeMode]()
        devices = set[tuple[str, str]]()
        for hosted in served.roster.loaded():
            info = hosted.engine.info
            modes |= {info.decode_mode} if info.decode_mode else {DecodeMode.BATCHED, DecodeMode.PER_SLOT}
            if (info.device_kind, info.device_name) in devices:
                continue
            devices.add((info.device_kind, info.device_name))
            reply.backends.add(
                name=info.device_kind,
                device=info.device_name,
                features=info.kernels.split(),
                num_threads=info.num_threads if info.device_kind == "cpu" else 0,
                memory_total_bytes=info.plan.device_total_bytes,
                memory_free_bytes=info.plan.device_free_bytes,
            )
        reply.capabilities.extend(_MODE_CAPABILITIES[mode] for mode in sorted(modes))
        return reply

    async def GetLoad(
        self, request: admin_service_pb2.GetLoadRequest, context: Any
    ) -> admin_service_pb2.GetLoadResponse:
        """Queue, slots and KV use of each engine."""
        roster = self._served.roster
        if not request.model:
            return admin_service_pb2.GetLoadResponse(engines=[_load(hosted) for hosted in roster.loaded()])
        one = roster.find(request.model) or self._served.get(request.model)
        return admin_service_pb2.GetLoadResponse(engines=[_load(one)] if one.is_loaded else [])

    async def CreateEngine(
        self, request: admin_service_pb2.CreateEngineRequest, context: Any
    ) -> admin_service_pb2.CreateEngineResponse:
        """Load a model into a new engine."""
        served = self._served
        served.refuse_when_draining()
        config = validate_engine(request, served.config)
        if served.roster.find(config.name) is None:
            path = await asyncio.to_thread(find_model, request.source, served.config.model_dir)
            config = dataclasses.replace(config, model=path)
        try:
            hosted = await served.roster.create(config, request.expected_digest)
        except ServiceError as error:
            _hide_path(error, config.model, request.source)
            raise
        model = await describe(hosted, served.is_draining)
        return admin_service_pb2.CreateEngineResponse(model=model)

    async def DestroyEngine(
        self, request: admin_service_pb2.DestroyEngineRequest, context: Any
    ) -> admin_service_pb2.DestroyEngineResponse:
        """Stop one engine and give its memory back."""
        if not request.name:
            raise InvalidFieldError([("name", "expected the name of an engine, found nothing")])
        grace_s = validate_grace(request, 0.0)
        ended = await self._served.roster.destroy(request.name, grace_s)
        return admin_service_pb2.DestroyEngineResponse(num_ended_calls=ended.num_calls, freed_bytes=ended.freed_bytes)

    async def Drain(  # type: ignore[override]  # a coroutine that writes, which grpc.aio takes too
        self, request: admin_service_pb2.DrainRequest, context: Any
    ) -> None:
        """Take no new work, let what runs finish, then stop the server."""
        served = self._served
        draining = served.draining
        draining.begin(validate_grace(request, served.config.drain_grace))
        last: tuple[int, int] | None = None
        while not draining.is_over:
            now = served.generations.count_states()
            if now != last:
                await context.write(
                    admin_service_pb2.DrainResponse(num_running_requests=now[0], num_waiting_requests=now[1])
                )
            last = now
            await asyncio.sleep(_POLL_S)
        await draining.wait()
        await context.write(admin_service_pb2.DrainResponse(is_drained=True))

    def _limits(self) -> admin_service_pb2.ServerLimits:
        config = self._served.config
        limits = admin_service_pb2.ServerLimits(
            max_message_bytes=config.max_message_bytes,
            max_queue_requests=config.max_queue,
            max_stop_strings=settings.MAX_STOP_STRINGS,
            max_stop_string_bytes=settings.MAX_STOP_STRING_BYTES,
            max_stop_tokens=settings.MAX_STOP_TOKENS,
            max_logit_bias=settings.MAX_LOGIT_BIAS,
            max_top_logprobs=settings.MAX_TOP_LOGPROBS,
            max_outputs=self._max_outputs(),
            max_constraint_bytes=MAX_CONSTRAINT_BYTES,
            max_chat_messages=config.max_chat_messages,
            max_lease=convert.duration(config.max_lease),
            receipt_ttl=convert.duration(RECEIPT_TTL_S),
            stall_allowance=convert.duration(config.stall_allowance),
            max_concurrent_calls=config.max_concurrent_calls,
            drain_grace=convert.duration(config.drain_grace),
        )
        if config.default_max_tokens:
            limits.default_max_tokens = config.default_max_tokens
        if config.default_queue_time:
            limits.default_queue_time.CopyFrom(convert.duration(config.default_queue_time))
        return limits

    def _max_outputs(self) -> int:
        """What every engine takes: one with fewer seats and places in its queue takes no more than these."""
        limits = [self._served.limits(hosted.engine).max_outputs for hosted in self._served.roster.loaded()]
        return min(limits, default=settings.MAX_OUTPUTS)


def _load(hosted: Hosted) -> admin_service_pb2.EngineLoad:
    engine = hosted.engine
    stats = engine.stats()
    load = admin_service_pb2.EngineLoad(
        model=hosted.name,
        snapshot_time=convert.timestamp(time.time()),
        num_running_requests=stats.num_running,
        num_waiting_requests=stats.num_waiting,
        num_slots=stats.slots_total,
        num_free_slots=stats.slots_total - stats.slots_used,
        num_kv_blocks=stats.blocks_total,
        num_used_kv_blocks=stats.blocks_used,
        num_cached_kv_blocks=stats.blocks_cached,
        num_steps=stats.num_steps,
        num_prompt_tokens=stats.num_prompt_tokens - stats.num_cached_tokens,
        num_cached_tokens=stats.num_cached_tokens,
        num_generated_tokens=stats.num_generated_tokens,
        num_preemptions=stats.num_preemptions,
    )
    if engine.step_time_s is not None:
        load.step_time.CopyFrom(convert.duration(engine.step_time_s))
    return load


def _hide_path(error: ServiceError, path: Path, source: str) -> None:
    """Say of a model's file what the caller called it: where it lies is the server's own business."""
    error.message = error.message.replace(str(path), source)
    error.metadata = {key: value.replace(str(path), source) for key, value in error.metadata.items()}
    if error.reason in (Reason.MODEL_NOT_FOUND, Reason.TRUNCATED_MODEL) and error.resource is None:
        error.resource = ("xllm.v1.Model", source)
