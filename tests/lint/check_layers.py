"""Checks the C++ half of the architecture: who includes whom, and what no file of the core may do.

Run by ``./build.sh check``; by hand: ``python tests/lint/check_layers.py [cuda_src]``. Prints
``file:line: message`` for each finding and exits 1 if there was one. import-linter does the same
for the Python half.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

# Folder of src/ -> what its files may include besides their own folder: folders, or single headers.
# The longest matching key is a file's rule, so a single file can have its own.
LAYERS: dict[str, tuple[str, ...]] = {
    "base": (),
    "base/error": (),  # home of XLLM_DCHECK, the one thing that may abort
    "tensor": ("base",),
    "gguf": ("tensor", "base"),
    "tokenizer": ("base",),
    "kvcache": ("tensor", "base"),
    "backend": ("tensor", "base"),
    "backend/factory": ("backend/cpu", "backend/cuda", "tensor", "base", "build_info.h"),
    "backend/cpu": ("backend/*.h", "tensor", "base"),
    "backend/cuda": ("backend/*.h", "tensor", "base", "build_info.h"),
    "model": ("gguf", "kvcache", "backend/*.h", "tensor", "base"),
    "sampling": ("backend/*.h", "tensor", "base"),
    "engine": (
        *("model", "sampling", "kvcache", "tokenizer", "backend/*.h", "backend/factory.h"),
        *("gguf", "tensor", "base"),
    ),
    "engine/scheduler": ("kvcache", "base"),
    "capi": (
        *(
            "engine",
            "model",
            "sampling",
            "kvcache",
            "tokenizer",
            "backend/*.h",
            "backend/factory.h",
        ),
        *("gguf", "tensor", "base", "build_info.h", "xllm.h"),
    ),
}
# The scheduler is policy over sequences and block ids; of its own folder it may see these alone.
OWN_FOLDER: dict[str, tuple[str, ...]] = {
    "engine/scheduler": ("engine/scheduler.h", "engine/sequence.h"),
}

CUDA_HEADER = re.compile(r"^(cu|nv|cooperative_groups|mma\.h|device_|vector_types|sm_\d)")
FOREIGN_HEADER = re.compile(r"^(Python\.h|google/|grpc|protobuf/|absl/|Cython)")

BANNED = (
    (
        re.compile(r"\b(secure_)?getenv\s*\(|\benviron\b|\b(un)?setenv\s*\("),
        "reads the environment; take an option instead",
    ),
    (
        re.compile(r"(?<![\w.>])(std::)?(abort|_?exit|quick_exit|_Exit)\s*\("),
        "ends the process; throw xllm::Error instead",
    ),
)
MUTABLE_STATIC = re.compile(
    r"^\s*((static|thread_local|inline|__device__|__managed__)\s+)+"
    r"(?!.*\b(const|constexpr|constinit|__constant__)\b)[\w:][^()]*?(=|;|\{)"
)
NOT_A_VARIABLE = frozenset(
    (
        *("using", "namespace", "typedef", "struct", "class", "enum", "union", "template"),
        *("return", "extern", "friend", "static_assert", "constexpr", "const", "static"),
        *("thread_local", "inline", "__constant__", "goto", "break", "continue", "delete"),
        *("throw", "case", "default", "public", "private", "protected"),
    )
)
FILE_SCOPE_VARIABLE = re.compile(r"^([A-Za-z_][\w:<>,*& ]*?[ *&>])(\w+)(\[[^\]]*\])*\s*(=[^=].*|\{.*\})?;\s*$")

Finding = tuple[int, str]


def blank_comments_and_strings(text: str) -> str:
    """Return the text with comments and string contents blanked out, line by line in place."""

    def blank(match: re.Match[str]) -> str:
        found = match.group(0)
        if found.startswith("#"):  # an include keeps its quoted path
            return found
        if found.startswith('"'):
            return '""'
        return re.sub(r"[^\n]", " ", found)

    pattern = r'^#\s*include[^\n]*|//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"'
    return re.sub(pattern, blank, text, flags=re.DOTALL | re.MULTILINE)


def rule_of(path: str) -> str | None:
    """Return the key of LAYERS for a path relative to src/, None where the folder is unknown."""
    stem = re.sub(r"\.\w+$", "", path)
    while stem:
        if stem in LAYERS:
            return stem
        stem = stem.rpartition("/")[0]
    return None


def is_allowed(include: str, allowed: tuple[str, ...]) -> bool:
    """Tell whether an include is one of the named headers, or lies in one of the named folders."""
    folder, _, name = include.rpartition("/")
    for entry in allowed:
        if entry.endswith("/*.h"):
            # A folder's interface, without the factory, which names the devices.
            if folder == entry[:-4] and not name.startswith("factory"):
                return True
        elif include == entry or include.startswith(entry + "/"):
            return True
    return False


def check_include(path: str, include: str, is_quoted: bool) -> Iterator[str]:
    """Yield what is wrong with one include directive of the file `path`, relative to src/."""
    if FOREIGN_HEADER.match(include):
        yield f"{include}: the core knows no Python, no protobuf and no gRPC"
    if CUDA_HEADER.match(include):
        if not path.startswith("backend/cuda/"):
            yield f"{include}: CUDA headers belong to backend/cuda alone"
        return
    if not is_quoted:
        return
    rule = rule_of(path)
    if rule is None:
        yield f"folder {path.rpartition('/')[0]} has no row in the table of layers"
        return
    own = path.rpartition("/")[0]
    if include.startswith(own + "/") and "/" not in include.removeprefix(own + "/"):
        seen = OWN_FOLDER.get(rule)
        if seen is not None and include not in seen:
            yield f"{include}: {rule} may include {', '.join(seen)} of its folder alone"
        return
    if not is_allowed(include, LAYERS[rule]):
        allowed = ", ".join(LAYERS[rule]) or "the standard library"
        yield f"{include}: {rule} may include {allowed}"


def check_text(path: str, text: str) -> Iterator[Finding]:
    """Yield (line number, message) for one file; `path` is relative to src/."""
    lines = blank_comments_and_strings(text).split("\n")
    for number, line in enumerate(lines, start=1):
        directive = re.match(r'^\s*#\s*include\s*(["<])([^">]+)[">]', line)
        if directive:
            for message in check_include(path, directive.group(2), directive.group(1) == '"'):
                yield number, message
            continue
        for pattern, message in BANNED:
            if pattern.search(line) and rule_of(path) != "base/error":
                yield number, message
        if MUTABLE_STATIC.match(line):
            yield number, "mutable static state; keep it in the object that owns it"
        variable = FILE_SCOPE_VARIABLE.match(line)
        if variable and variable.group(1).split()[0].split("::")[0] not in NOT_A_VARIABLE:
            yield number, "mutable variable at file scope; keep it in the object that owns it"


def check_tree(root: Path) -> Iterator[str]:
    """Yield one printable line per finding below root/src."""
    src = root / "src"
    for file in sorted(src.rglob("*")):
        if file.suffix in {".h", ".cc", ".cu", ".cuh", ".inc"}:
            path = file.relative_to(src).as_posix()
            for number, message in check_text(path, file.read_text(encoding="utf-8")):
                yield f"{file}:{number}: {message}"


def main() -> int:
    """Check the tree named on the command line, cuda_src by default."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "cuda_src")
    findings = list(check_tree(root))
    print("\n".join(findings) if findings else "layers: ok")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
