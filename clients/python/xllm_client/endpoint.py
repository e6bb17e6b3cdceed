"""Addresses of a server: how they are written, and where one listens when nothing is said.

The server uses this module too, so that both sides read an address alike and agree on the default.
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

_FORMS = "write unix:PATH, unix:///PATH, HOST:PORT or [IPV6]:PORT"
_MAX_SOCKET_PATH = 107  # bytes of sockaddr_un.sun_path on Linux, without its NUL
_HOST = re.compile(r"[A-Za-z0-9_.\-]+")


@dataclass(frozen=True)
class Endpoint:
    """A parsed address: either `path` (unix socket), or `host` and `port` (TCP)."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Read an address as a user writes it. Raises ValueError with the forms that are accepted."""
        if text.startswith("unix:"):
            return cls(path=_socket_path(text))
        host, colon, port = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        if not colon or not (bracketed or _HOST.fullmatch(host)):
            raise ValueError(f"{text!r} is no address; {_FORMS}")
        if not (port.isascii() and port.isdigit() and int(port) <= 65535):
            raise ValueError(f"{text!r}: expected a port from 0 to 65535, found {port!r}; {_FORMS}")
        if bracketed and not _is_ipv6(host[1:-1]):
            raise ValueError(f"{text!r}: {host} is no IPv6 address; {_FORMS}")
        return cls(host=host.strip("[]"), port=int(port))

    @property
    def is_unix(self) -> bool:
        """It is a unix socket."""
        return self.path is not None

    @property
    def is_loopback(self) -> bool:
        """Nobody on another machine can reach it: a unix socket, `localhost` or a loopback address."""
        if self.is_unix or self.host.lower() == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        """Return the address in the form that gRPC takes, for channels and for listeners."""
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def default_endpoint() -> Endpoint:
    """Return the unix socket on which `xllm serve` listens when nothing is said.

    `$XDG_RUNTIME_DIR/xllm/xllm.sock` where that folder exists, else `xllm-UID/xllm.sock` in the folder for temporary
    files. Creates nothing.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime) and os.path.isdir(runtime):
        return Endpoint(path=Path(runtime, "xllm", "xllm.sock"))
    return Endpoint(path=Path(tempfile.gettempdir(), f"xllm-{os.getuid()}", "xllm.sock"))


def _socket_path(text: str) -> Path:
    path = text.removeprefix("unix:")
    if path.startswith("//"):
        path = path[2:]
        if not path.startswith("/"):
            raise ValueError(f"{text!r}: unix:// takes an absolute path, as in unix:///run/xllm.sock")
    if not path or "\0" in path or path.endswith("/"):
        raise ValueError(f"{text!r} names no socket; {_FORMS}")
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise ValueError(f"{text!r}: the path is longer than {_MAX_SOCKET_PATH} bytes; choose a shorter one")
    return Path(path)


def _is_ipv6(host: str) -> bool:
    try:
        return ip_address(host).version == 6
    except ValueError:
        return False
