"""Generate the Python stubs of xllm.v1 into xllm_client/v1.

The stubs import as `from xllm_client.v1 import generation_service_pb2`, while their descriptors keep the file names
`xllm/v1/*.proto` and the package `xllm.v1`, which reflection and other languages see. Needs grpcio-tools. Run it as
`python generate_stubs.py [--force]`; it does nothing while protos, generator and compiler are what they were.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.resources
import re
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
STUBS = HERE / "xllm_client" / "v1"
# In the repository, and in a source distribution of the client.
PROTO_ROOTS = (HERE.parent.parent / "protos", HERE / "protos")
_KEY = STUBS / ".stubs-key"
_SUFFIXES = ("_pb2.py", "_pb2.pyi")
_SERVICE_SUFFIXES = (*_SUFFIXES, "_pb2_grpc.py", "_pb2_grpc.pyi")  # for *_service.proto
_IMPORT = re.compile(r"^from xllm\.v1 import ", re.MULTILINE)


class GenerationError(Exception):
    """The stubs cannot be generated; the message says what to do."""


def find_protos() -> Path:
    """Return the folder that holds xllm/v1. Raises GenerationError where there is none."""
    for root in PROTO_ROOTS:
        if (root / "xllm" / "v1" / "generation_service.proto").is_file():
            return root
    raise GenerationError(f"no protos in {' or '.join(map(str, PROTO_ROOTS))}; build from a full checkout")


def generate(*, force: bool = False) -> bool:
    """Bring the stubs up to date and return whether anything was written.

    Files appear one by one, each complete. Raises GenerationError when the protos or grpcio-tools are missing, or the
    protos do not compile.
    """
    root = find_protos()
    protos = sorted((root / "xllm" / "v1").glob("*.proto"))
    key = _key(protos)
    wanted = {
        proto.stem + suffix
        for proto in protos
        for suffix in (_SERVICE_SUFFIXES if proto.stem.endswith("_service") else _SUFFIXES)
    }
    if not force and _is_current(key, wanted):
        return False
    with tempfile.TemporaryDirectory(prefix="xllm-stubs-") as temporary:
        _compile(root, protos, Path(temporary))
        for name in sorted(wanted):
            text = (Path(temporary) / "xllm" / "v1" / name).read_text(encoding="utf-8")
            _replace(STUBS / name, _IMPORT.sub("from xllm_client.v1 import ", text))
    for stale in STUBS.glob("*_pb2*"):
        if stale.name not in wanted:
            stale.unlink()
    _replace(_KEY, key)
    return True


def _key(protos: list[Path]) -> str:
    """Hash everything that decides what the stubs look like."""
    try:
        compiler = importlib.metadata.version("grpcio-tools")
    except importlib.metadata.PackageNotFoundError:
        raise GenerationError("grpcio-tools is not installed: pip install grpcio-tools==1.76.0") from None
    digest = hashlib.sha256(compiler.encode())
    for path in (HERE / "generate_stubs.py", HERE / "grpc_stub_types.py", *protos):
        content = path.read_bytes()
        digest.update(f"\0{path.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _is_current(key: str, wanted: set[str]) -> bool:
    if not _KEY.is_file() or _KEY.read_text(encoding="utf-8") != key:
        return False
    return {path.name for path in STUBS.glob("*_pb2*")} == wanted


def _compile(root: Path, protos: list[Path], out: Path) -> None:
    """Run protoc on `protos`; all four kinds of stub end up below `out`."""
    from google.protobuf import descriptor_pb2
    from grpc_stub_types import stub_types
    from grpc_tools import protoc

    descriptors = out / "descriptors.bin"
    arguments = [
        "protoc",
        f"-I{root}",
        f"-I{importlib.resources.files('grpc_tools') / '_proto'}",  # google/protobuf/*.proto
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
        f"--descriptor_set_out={descriptors}",
        *(proto.relative_to(root).as_posix() for proto in protos),
    ]
    if protoc.main(arguments) != 0:
        raise GenerationError("the protos do not compile; protoc's messages are above")
    files = descriptor_pb2.FileDescriptorSet.FromString(descriptors.read_bytes())
    for name, text in stub_types(files).items():
        (out / name).write_text(text, encoding="utf-8")


def _replace(path: Path, text: str) -> None:
    """Write `text` so that a reader sees the old file or the new one, never half of it."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Generate xllm_client/v1 from protos/xllm/v1.")
    parser.add_argument("--force", action="store_true", help="generate even when nothing changed")
    options = parser.parse_args()
    try:
        written = generate(force=options.force)
    except GenerationError as error:
        print(f"generate_stubs: {error}", file=sys.stderr)
        return 1
    if written:
        print(f"generate_stubs: wrote {STUBS.relative_to(HERE)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
