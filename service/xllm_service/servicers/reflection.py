"""Server reflection under both its names: v1alpha, which grpcio-reflection ships, and v1, which is the same service."""

from __future__ import annotations

from collections.abc import Iterable

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha._async import ReflectionServicer

_ALPHA = "grpc.reflection.v1alpha"
_V1 = "grpc.reflection.v1"
SERVICES = (f"{_ALPHA}.ServerReflection", f"{_V1}.ServerReflection")


def add_reflection(server: grpc.aio.Server, services: Iterable[str]) -> None:
    """Let clients of `server` list these services, and reflection's own two."""
    _describe_v1()
    servicer = ReflectionServicer((*services, *SERVICES))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(SERVICES[1], {"ServerReflectionInfo": method})
    server.add_generic_rpc_handlers((handler,))


def _describe_v1() -> None:
    """Make v1 known to the pool, so that it can be described like any other service."""
    pool = descriptor_pool.Default()  # type: ignore[no-untyped-call]
    try:
        pool.FindFileContainingSymbol(SERVICES[1])
    except KeyError:
        file = descriptor_pb2.FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)
        file.name = "grpc/reflection/v1/reflection.proto"
        file.package = _V1
        for field in (field for message in file.message_type for field in message.field):
            if field.HasField("type_name"):
                field.type_name = _as_v1(field.type_name)
        for method in (method for service in file.service for method in service.method):
            method.input_type = _as_v1(method.input_type)
            method.output_type = _as_v1(method.output_type)
        pool.AddSerializedFile(file.SerializeToString())


def _as_v1(name: str) -> str:
    return name.replace(f".{_ALPHA}.", f".{_V1}.")
