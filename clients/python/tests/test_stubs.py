"""The generated stubs: what other languages and the server rely on."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor

from xllm_client import DecodeMode
from xllm_client.v1 import decode_mode_pb2, generation_service_pb2

HERE = Path(__file__).resolve().parent.parent
PROTOS = sorted((HERE.parent.parent / "protos" / "xllm" / "v1").glob("*.proto"))


@pytest.mark.parametrize("name", [proto.stem for proto in PROTOS])
def test_descriptors_keep_the_contracts_names(name: str) -> None:
    descriptor: FileDescriptor = import_module(f"xllm_client.v1.{name}_pb2").DESCRIPTOR
    assert descriptor.name == f"xllm/v1/{name}.proto"
    assert descriptor.package == "xllm.v1"
    imports = {dependency.name for dependency in descriptor.dependencies}
    assert all(i.startswith(("xllm/v1/", "google/protobuf/")) for i in imports), imports


def test_decode_mode_has_the_contracts_numbers() -> None:
    names = {f"DECODE_MODE_{mode.name}": mode.value for mode in DecodeMode}
    assert names == dict(decode_mode_pb2.DecodeMode.items())


def test_every_service_and_method_is_there() -> None:
    found = {
        service: sorted(
            method.name
            for method in import_module(f"xllm_client.v1.{module}").DESCRIPTOR.services_by_name[service].methods
        )
        for service, module in (
            ("GenerationService", "generation_service_pb2"),
            ("SlotService", "slot_service_pb2"),
            ("ModelService", "model_service_pb2"),
            ("AdminService", "admin_service_pb2"),
        )
    }
    assert found == {
        "GenerationService": [
            "CancelGeneration", "EstimateGeneration", "Generate", "GenerateOnce", "GetGeneration",
        ],
        "SlotService": [
            "AcquireSlot", "DecodeBatch", "DecodeSlot", "ForkSlot", "GetSlot", "ListSlots", "Prefill",
            "ReleaseSlot", "RenewSlot", "WatchSlots",
        ],
        "ModelService": ["Detokenize", "GetModel", "ListModels", "RenderChat", "Tokenize"],
        "AdminService": ["CreateEngine", "DestroyEngine", "Drain", "GetLoad", "GetServerInfo"],
    }  # fmt: skip


def test_numbers_out_of_range_cross_the_wire_as_they_are() -> None:
    spec = generation_service_pb2.GenerationSpec()
    spec.token_ids.ids.extend([-1, 2**31])
    spec.limits.max_tokens = 2**31
    spec.sampling.top_k = -5
    again = generation_service_pb2.GenerationSpec.FromString(spec.SerializeToString())
    assert list(again.token_ids.ids) == [-1, 2**31]
    assert (again.limits.max_tokens, again.sampling.top_k) == (2**31, -5)


def test_generator_does_nothing_when_nothing_changed() -> None:
    pytest.importorskip("grpc_tools")
    before = {path: path.stat().st_mtime_ns for path in (HERE / "xllm_client" / "v1").iterdir()}
    done = subprocess.run([sys.executable, HERE / "generate_stubs.py"], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_wheel_contains_the_stubs(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=HERE, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for proto in PROTOS:
        assert {f"xllm_client/v1/{proto.stem}_pb2.py", f"xllm_client/v1/{proto.stem}_pb2.pyi"} <= names
    assert "xllm_client/py.typed" in names
    assert not any(name.startswith(("tests/", "generate_stubs")) for name in names)
