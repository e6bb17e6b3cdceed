"""AdminService: GetServerInfo and GetLoad."""

from __future__ import annotations

import time
from typing import Any

from xllm_client.v1 import admin_service_pb2, admin_service_pb2_grpc
from xllm_service import config as settings
from xllm_service import convert
from xllm_service.admission import RECEIPT_TTL_S
from xllm_service.engine import DecodeMode, build_id, version
from xllm_service.servicers.served import SCHEMA_REVISION, Served

_CAPABILITIES = (
    admin_service_pb2.CAPABILITY_GENERATE,
    admin_service_pb2.CAPABILITY_RECEIPTS,
    admin_service_pb2.CAPABILITY_CHAT,
    admin_service_pb2.CAPABILITY_STOP,
    admin_service_pb2.CAPABILITY_LOGIT_BIAS,
    admin_service_pb2.CAPABILITY_LOGPROBS,
    admin_service_pb2.CAPABILITY_PRIORITY,
    admin_service_pb2.CAPABILITY_LOAD,
)


class AdminServicer(admin_service_pb2_grpc.AdminServiceServicer):
    """Tells what the server is and how busy; answers in every phase, from snapshots."""

    def __init__(self, served: Served) -> None:
        self._served = served

    async def GetServerInfo(
        self, request: admin_service_pb2.GetServerInfoRequest, context: Any
    ) -> admin_service_pb2.GetServerInfoResponse:
        """Build, capabilities and limits."""
        served = self._served
        reply = admin_service_pb2.GetServerInfoResponse(
            version=version,
            commit=build_id,
            schema_revision=SCHEMA_REVISION,
            capabilities=_CAPABILITIES,
            limits=self._limits(),
            models=[served.name],
            start_time=convert.timestamp(served.start_time),
            is_draining=served.is_draining,
        )
        if served.engine is None:
            return reply
        info = served.engine.info
        modes = {
            DecodeMode.BATCHED: (admin_service_pb2.CAPABILITY_DECODE_BATCHED,),
            DecodeMode.PER_SLOT: (admin_service_pb2.CAPABILITY_DECODE_PER_SLOT,),
        }
        reply.capabilities.extend(modes.get(info.decode_mode, (c for both in modes.values() for c in both)))
        reply.backends.add(
            name=info.device_kind,
            device=info.device_name,
            features=info.kernels.split(),
            num_threads=info.num_threads if info.device_kind == "cpu" else 0,
            memory_total_bytes=info.plan.device_total_bytes,
            memory_free_bytes=info.plan.device_free_bytes,
        )
        return reply

    async def GetLoad(
        self, request: admin_service_pb2.GetLoadRequest, context: Any
    ) -> admin_service_pb2.GetLoadResponse:
        """Queue, slots and KV use of each engine."""
        served = self._served
        if served.engine is None and request.model in ("", served.name):
            return admin_service_pb2.GetLoadResponse()
        engine = served.get_engine(request.model)
        stats = engine.stats()
        load = admin_service_pb2.EngineLoad(
            model=served.name,
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
        return admin_service_pb2.GetLoadResponse(engines=[load])

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
            max_outputs=settings.MAX_OUTPUTS,
            max_chat_messages=config.max_chat_messages,
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
