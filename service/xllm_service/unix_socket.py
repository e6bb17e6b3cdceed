"""A unix socket that only its owner can reach, from the first instant, and that no second server can take over.

Left to itself gRPC binds a path that another server is using, and the new socket's mode follows the umask. So a lock
file beside the path says who has it, a stale socket is removed only under that lock, and the umask is narrow while the
socket is made.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

_PROBE_TIMEOUT_S = 1.0


class SocketError(Exception):
    """The socket cannot be had; the message says why and what to do."""


class UnixSocket:
    """Holds a path for one server, until `close`.

    Args:
        path: where the socket will be. Its folder is made, private, where there is none.

    Raises SocketError: another server has the path, something else is there, or the folder is not safe.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_path = path.with_name(path.name + ".lock")
        _private_folder(path.parent)
        self._lock = self._take_lock()
        try:
            self._remove_stale()
        except BaseException:
            self._drop_lock()
            raise

    def bind(self, listen: Callable[[], object]) -> None:
        """Let `listen` make the socket, readable and writable by its owner alone."""
        before = os.umask(0o177)
        try:
            listen()
        finally:
            os.umask(before)
        if self.path.stat().st_mode & 0o077:
            raise SocketError(f"{self.path}: others can reach the socket; choose a folder on a local file system")

    def close(self) -> None:
        """Remove the socket and its lock. Calling it again is harmless."""
        if self._lock < 0:
            return
        self.path.unlink(missing_ok=True)
        self._drop_lock()

    def _take_lock(self) -> int:
        while True:
            try:
                lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise SocketError(f"{self._lock_path}: {error.strerror}; choose another --listen") from None
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise SocketError(
                    f"{self.path}: another server listens there; stop it, or choose another --listen"
                ) from None
            # The holder before us removes the file: what we have locked must be what is there.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.stat(self._lock_path)):
                    return lock
            os.close(lock)

    def _drop_lock(self) -> None:
        lock, self._lock = self._lock, -1
        self._lock_path.unlink(missing_ok=True)
        os.close(lock)

    def _remove_stale(self) -> None:
        try:
            mode = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise SocketError(f"{self.path}: is there and is no socket; choose another --listen, or remove it")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_PROBE_TIMEOUT_S)
            try:
                probe.connect(str(self.path))
            except ConnectionRefusedError:
                self.path.unlink()
                return
            except OSError as error:
                raise SocketError(f"{self.path}: {error.strerror or 'does not answer'}; remove it by hand") from None
        raise SocketError(f"{self.path}: another program listens there; stop it, or choose another --listen")


def _private_folder(folder: Path) -> None:
    """Make the folder, for its owner alone; one that is there must not let others replace the socket."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise SocketError(f"{folder}: {error.strerror}; choose another --listen") from None
    if found.st_uid not in (os.geteuid(), 0):
        raise SocketError(f"{folder}: belongs to user {found.st_uid}; choose a folder of your own")
    if found.st_mode & 0o022:
        # note: a sticky folder is no better: somebody else may be there first, and take our clients' prompts.
        raise SocketError(
            f"{folder}: others can write to it; choose a folder of your own, such as {folder / f'xllm-{os.geteuid()}'}"
        )
