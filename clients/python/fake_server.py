# ruff: noqa: D102 - the methods are the contract's
"""A server for the client's tests, on the generated base classes: it speaks the contract and has no model.

Tokens are bytes, and a generation repeats its prompt. A test replaces `on_generate` to make anything else happen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from xllm_client.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    chat_pb2,
    decode_mode_pb2,
    generation_pb2,
    generation_service_pb2,
    generation_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
    plan_pb2,
)

Handler = Callable[
    [generation_service_pb2.GenerateRequest, grpc.ServicerContext],
    Iterator[generation_service_pb2.GenerateResponse],
]


def refuse(
    context: grpc.ServicerContext,
    code: grpc.StatusCode,
    reason: str,
    message: str,
    *details: Message,
    retry_delay_s: float | None = None,
    metadata: dict[str, str] | None = None,
) -> NoReturn:
    """End a call as the contract says: the status, with ErrorInfo first among its details."""
    info = error_details_pb2.ErrorInfo(domain="xllm", reason=reason, metadata=metadata or {})
    all_details: list[Message] = [info, *details]
    if retry_delay_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(retry_delay_s * 1e9))
        all_details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in all_details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    status = status_pb2.Status(code=code.value[0], message=message, details=packed)
    context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort_with_status always raises")


def prompt_text(spec: generation_service_pb2.GenerationSpec) -> str:
    """Return the prompt, whichever way it came."""
    match spec.WhichOneof("input"):
        case "text":
            return spec.text
        case "token_ids":
            return bytes(spec.token_ids.ids).decode()
        case "chat":
            return render(spec.chat)
    raise AssertionError("the client always sends an input")


def render(chat: chat_pb2.Chat) -> str:
    """Return the conversation as one text."""
    return "".join(f"<{m.role}>{''.join(p.text for p in m.parts)}" for m in chat.messages)


def whole_output(spec: generation_service_pb2.GenerationSpec) -> generation_pb2.Output:
    """Return the prompt, cut at max_tokens characters."""
    text = prompt_text(spec)
    limited = spec.limits.HasField("max_tokens") and spec.limits.max_tokens < len(text)
    text = text[: spec.limits.max_tokens] if limited else text
    reason = generation_pb2.FINISH_REASON_MAX_TOKENS if limited else generation_pb2.FINISH_REASON_EOS
    return generation_pb2.Output(text=text, finished=generation_pb2.OutputFinished(reason=reason, num_tokens=len(text)))


def accepted(spec: generation_service_pb2.GenerationSpec) -> generation_pb2.Accepted:
    """Return the first event of a generation."""
    message = generation_pb2.Accepted(
        request_id=spec.request_id or "generated-id",
        model="fake",
        decode_mode=spec.decode_mode or decode_mode_pb2.DECODE_MODE_BATCHED,
        num_prompt_tokens=len(prompt_text(spec).encode()),
    )
    message.effective.sampling.CopyFrom(spec.sampling)
    if not spec.sampling.HasField("seed"):
        message.effective.sampling.seed = 7
    return message


def usage(spec: generation_service_pb2.GenerationSpec) -> generation_pb2.Usage:
    """Count a character as a token."""
    output = whole_output(spec)
    return generation_pb2.Usage(
        num_prompt_tokens=len(prompt_text(spec).encode()), num_generated_tokens=output.finished.num_tokens
    )


def repeat(
    request: generation_service_pb2.GenerateRequest, context: grpc.ServicerContext
) -> Iterator[generation_service_pb2.GenerateResponse]:
    """The ordinary stream: a character per delta."""
    output = whole_output(request.spec)
    progress = generation_pb2.PrefillProgress(num_processed_tokens=1, num_prompt_tokens=2)
    yield generation_service_pb2.GenerateResponse(sequence=0, accepted=accepted(request.spec))
    yield generation_service_pb2.GenerateResponse(sequence=1, prefill_progress=progress)
    for index, character in enumerate(output.text):
        delta = generation_pb2.Delta(text=character, num_tokens=1)
        yield generation_service_pb2.GenerateResponse(sequence=2 + index, delta=delta)
    yield generation_service_pb2.GenerateResponse(output_finished=output.finished)
    finished = generation_pb2.Finished(usage=usage(request.spec))
    yield generation_service_pb2.GenerateResponse(finished=finished)


class FakeServer(
    generation_service_pb2_grpc.GenerationServiceServicer,
    model_service_pb2_grpc.ModelServiceServicer,
    admin_service_pb2_grpc.AdminServiceServicer,
):
    """Serves one unix socket.

    Attributes:
        on_generate: What Generate does; each call is in `requests`, its metadata in `metadata`.
        call_ended: Set when a Generate call is over, whoever ended it.
        refusals: How many unary calls are still to be refused with QUEUE_FULL and a short push-back.
    """

    def __init__(self, path: Path) -> None:
        self.endpoint = f"unix:{path}"
        self.on_generate: Handler = repeat
        self.requests: list[generation_service_pb2.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.call_ended = threading.Event()
        self.refusals = 0
        self.health = health.HealthServicer()
        self._server = grpc.server(ThreadPoolExecutor(8))
        generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(self, self._server)
        model_service_pb2_grpc.add_ModelServiceServicer_to_server(self, self._server)
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(self, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        self._server.add_insecure_port(self.endpoint)

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        self._server.stop(grace=None).wait()

    def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        self.health.set("", status.SERVING if serving else status.NOT_SERVING)

    def Generate(
        self, request: generation_service_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[generation_service_pb2.GenerateResponse]:
        self.requests.append(request)
        self.metadata.append({key: str(value) for key, value in context.invocation_metadata()})
        context.add_callback(self.call_ended.set)
        yield from self.on_generate(request, context)

    def GenerateOnce(
        self, request: generation_service_pb2.GenerateOnceRequest, context: grpc.ServicerContext
    ) -> generation_service_pb2.GenerateOnceResponse:
        self._maybe_refuse(context)
        return generation_service_pb2.GenerateOnceResponse(
            accepted=accepted(request.spec),
            outputs=[whole_output(request.spec)],
            usage=usage(request.spec),
        )

    def CancelGeneration(
        self, request: generation_service_pb2.CancelGenerationRequest, context: grpc.ServicerContext
    ) -> generation_service_pb2.CancelGenerationResponse:
        refuse(context, grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND", f"no generation {request.request_id}")

    def Tokenize(
        self, request: model_service_pb2.TokenizeRequest, context: grpc.ServicerContext
    ) -> model_service_pb2.TokenizeResponse:
        bos = not request.HasField("add_special_tokens") or request.add_special_tokens
        return model_service_pb2.TokenizeResponse(token_ids=[0] * bos + list(request.text.encode()))

    def Detokenize(
        self, request: model_service_pb2.DetokenizeRequest, context: grpc.ServicerContext
    ) -> model_service_pb2.DetokenizeResponse:
        return model_service_pb2.DetokenizeResponse(text=bytes(i for i in request.token_ids if i).decode())

    def RenderChat(
        self, request: model_service_pb2.RenderChatRequest, context: grpc.ServicerContext
    ) -> model_service_pb2.RenderChatResponse:
        return model_service_pb2.RenderChatResponse(text=render(request.chat))

    def ListModels(
        self, request: model_service_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> model_service_pb2.ListModelsResponse:
        self._maybe_refuse(context)
        return model_service_pb2.ListModelsResponse(models=[self._summary()])

    def GetModel(
        self, request: model_service_pb2.GetModelRequest, context: grpc.ServicerContext
    ) -> model_service_pb2.GetModelResponse:
        model = model_service_pb2.Model(
            summary=self._summary(),
            tensor_types=[model_service_pb2.TensorTypeUse(type="Q4_1", num_tensors=3, size_bytes=60)],
            end_of_generation=[model_service_pb2.EndOfGenerationToken(id=2, text="</s>", sources=["known name"])],
            plan=plan_pb2.Plan(kv_bytes_per_token=1024),
        )
        return model_service_pb2.GetModelResponse(model=model)

    def GetServerInfo(
        self, request: admin_service_pb2.GetServerInfoRequest, context: grpc.ServicerContext
    ) -> admin_service_pb2.GetServerInfoResponse:
        return admin_service_pb2.GetServerInfoResponse(version="0.1.0", schema_revision=1)

    def _summary(self) -> model_service_pb2.ModelSummary:
        return model_service_pb2.ModelSummary(
            name="fake",
            architecture="llama",
            num_parameters=1000,
            decode_mode=decode_mode_pb2.DECODE_MODE_BATCHED,
        )

    def _maybe_refuse(self, context: grpc.ServicerContext) -> None:
        if self.refusals > 0:
            self.refusals -= 1
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            refuse(context, code, "QUEUE_FULL", "the queue is full", retry_delay_s=0.01)
