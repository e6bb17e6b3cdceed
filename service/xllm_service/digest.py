"""Which model it is: the SHA-256 of its files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path

from xllm_service.errors import Reason, ServiceError

_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_CHUNK = 4 * 2**20  # bytes read at once


def shard_paths(path: Path) -> list[Path]:
    """Return all parts of a model file, in order: one, unless its name says 00001-of-N."""
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    return [path.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.gguf") for number in range(1, int(match[3]) + 1)]


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class FileDigest:
    """SHA-256 of a model's files, computed once, by a thread of its own that yields to everything else.

    Made right after the model was opened. A file that is another one by the time it is read gives no digest: it would
    vouch for a model that is not the one served.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._identities: list[tuple[int, int, int, int] | None] = []
        for path in self._paths:
            try:
                self._identities.append(_identity(path.stat()))
            except OSError:  # said when it is read
                self._identities.append(None)
        self._value = ""
        self.problem = ""
        self._thread: threading.Thread | None = None
        self._is_stopped = threading.Event()

    @property
    def value(self) -> str:
        """``sha256:`` and 64 hex digits; empty until it is known."""
        return self._value

    def start(self) -> None:
        """Begin, if that has not happened yet."""
        if self._thread is None and not self._is_stopped.is_set():
            self._thread = threading.Thread(target=self._run, name="xllm-digest", daemon=True)
            self._thread.start()

    def wait(self) -> str:
        """Return the digest once it is known; blocks. Raises ServiceError when the files cannot be read."""
        self.start()
        if self._thread is not None:
            self._thread.join()
        if not self._value:
            raise ServiceError(Reason.INTERNAL, f"the model's digest is not known: {self.problem or 'stopped'}")
        return self._value

    def stop(self) -> None:
        """End it, known or not."""
        self._is_stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # the whole machine is not ours to slow down
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        digest = hashlib.sha256()
        try:
            for path, identity in zip(self._paths, self._identities, strict=True):
                with path.open("rb", buffering=0) as file:
                    if identity != _identity(os.fstat(file.fileno())):
                        self.problem = "the file was replaced after the model was opened"
                        return
                    while chunk := file.read(_CHUNK):
                        if self._is_stopped.is_set():
                            return
                        digest.update(chunk)
        except OSError as error:
            self.problem = error.strerror or "the file cannot be read"
            return
        self._value = f"sha256:{digest.hexdigest()}"
