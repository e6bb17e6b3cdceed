"""Unix sockets: private from the first instant, stale ones replaced, no second server."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from xllm_service.unix_socket import SocketError, UnixSocket


def listen_at(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    made.listen()
    return made


def test_the_socket_is_the_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "run" / "x.sock"
    before = os.umask(0)
    try:
        held = UnixSocket(path)
        made: list[socket.socket] = []
        modes: list[int] = []

        def listen() -> None:
            made.append(listen_at(path))
            modes.append(stat.S_IMODE(path.stat().st_mode))

        held.bind(listen)
        assert os.umask(0) == 0, "the umask is what it was"
    finally:
        os.umask(before)
    assert modes == [0o600], "from the first instant"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    made[0].close()
    held.close()
    held.close()
    assert list(path.parent.iterdir()) == []


def test_a_second_server_is_refused_and_the_first_keeps_its_socket(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    held = UnixSocket(path)
    first: list[socket.socket] = []
    held.bind(lambda: first.append(listen_at(path)))
    with pytest.raises(SocketError, match="another server listens there"):
        UnixSocket(path)
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(path))
    first[0].close()
    held.close()
    UnixSocket(path).close()


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    listen_at(path).close()
    assert path.is_socket()
    UnixSocket(path).close()
    assert not path.exists()


def test_a_program_without_a_lock_is_not_robbed(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    with listen_at(path):
        with pytest.raises(SocketError, match="another program"):
            UnixSocket(path)
        assert path.is_socket()
    assert not path.with_name("x.sock.lock").exists()


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    path.write_text("precious")
    with pytest.raises(SocketError, match="no socket"):
        UnixSocket(path)
    assert path.read_text() == "precious"


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o720, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(SocketError, match="others can write to it; choose a folder of your own, such as"):
        UnixSocket(folder / "x.sock")
    assert list(folder.iterdir()) == []
    own = UnixSocket(folder / "own" / "x.sock")  # a folder of ours in it is safe
    own.close()
