"""Runs clang-tidy over the compile database, several files at once, and remembers what was clean.

A file is checked again only when it, a header it includes, its compile command or the configuration
has changed: the key of a clean result is a hash of all of these. By hand:
``python tests/lint/run_clang_tidy.py build/dev``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
ROOTS = ("cuda_src/src", "cuda_src/include")
CONFIGS = (Path(".clang-tidy"), Path("tests/core/.clang-tidy"), Path(__file__))
# Not for a C++ front end, or generated.
SKIPPED = (".cu", ".c")


def closure(path: Path, seen: dict[Path, bytes]) -> None:
    """Add a file and every header of ours that it includes, directly or not, to `seen`."""
    path = path.resolve()
    if path in seen or not path.is_file():
        return
    seen[path] = path.read_bytes()
    for name in INCLUDE.findall(seen[path].decode("utf-8", "replace")):
        for folder in (path.parent, *map(Path, ROOTS)):
            closure(folder / name, seen)


def key_of(entry: dict[str, str], config: bytes) -> str:
    """Return the hash under which a clean result of this compile command is remembered."""
    seen: dict[Path, bytes] = {}
    closure(Path(entry["file"]), seen)
    digest = hashlib.sha256(config + entry["command"].encode())
    for path in sorted(seen):
        digest.update(str(path).encode() + b"\0" + hashlib.sha256(seen[path]).digest())
    return digest.hexdigest()


def main() -> int:
    """Check every file of the database in the build folder named on the command line."""
    build = Path(sys.argv[1])
    cache = build.parent / "tidy"
    cache.mkdir(parents=True, exist_ok=True)
    version = subprocess.run(["clang-tidy", "--version"], capture_output=True, check=True).stdout
    config = version + b"".join(path.read_bytes() for path in CONFIGS)
    entries = json.loads((build / "compile_commands.json").read_text())
    wanted = {entry["file"]: cache / key_of(entry, config) for entry in entries if not entry["file"].endswith(SKIPPED)}
    pending = {file: stamp for file, stamp in wanted.items() if not stamp.exists()}

    def check(file: str) -> bool:
        command = ["clang-tidy", "--quiet", "-p", str(build), file]
        # Not errors of ours: GCC's own spelling of a warning, and what libstdc++ deprecates of itself.
        command += ["--extra-arg=-Wno-unknown-warning-option"]
        command += ["--extra-arg=-Wno-deprecated-declarations"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            pending[file].touch()
            return True
        errors = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        print(done.stdout.strip() or "\n".join(errors), flush=True)
        return False

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(check, pending))
    print(f"clang-tidy: {len(wanted)} files, {len(pending)} checked anew, {results.count(False)} with findings")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
