"""Addresses: which forms are read, and where a server is when nothing is said."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from xllm_client import Client, Endpoint, Tls, default_endpoint


@pytest.mark.parametrize(
    ("text", "target", "is_loopback"),
    [
        ("unix:run/x.sock", "unix:run/x.sock", True),
        ("unix:/run/x.sock", "unix:/run/x.sock", True),
        ("unix:///run/x.sock", "unix:/run/x.sock", True),
        ("localhost:50051", "localhost:50051", True),
        ("127.9.9.9:1", "127.9.9.9:1", True),
        ("[::1]:50051", "[::1]:50051", True),
        ("[::]:50051", "[::]:50051", False),
        ("0.0.0.0:0", "0.0.0.0:0", False),
        ("gpu-7.example.org:65535", "gpu-7.example.org:65535", False),
    ],
)
def test_forms_that_are_read(text: str, target: str, is_loopback: bool) -> None:
    endpoint = Endpoint.parse(text)
    assert str(endpoint) == target
    assert endpoint.is_loopback is is_loopback
    assert Endpoint.parse(str(endpoint)) == endpoint


@pytest.mark.parametrize(
    "text",
    ["", "host", ":1", "host:", "host:65536", "host:-1", "host:1x", "::1:50051", "[zz]:1", "[127.0.0.1]:1", "a b:1",
     "http://host:1", "unix:", "unix://x.sock", "unix:/run/", "unix:a\0b", "unix:/" + 107 * "x", "host:\u0661"],
)  # fmt: skip
def test_anything_else_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(ValueError, match=r"write unix:PATH|absolute path|shorter"):
        Endpoint.parse(text)


def test_default_is_in_the_runtime_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_endpoint() == Endpoint(path=tmp_path / "xllm" / "xllm.sock")
    assert not (tmp_path / "xllm").exists()


@pytest.mark.parametrize("runtime", ["", "relative", "/no/such/folder"])
def test_default_without_a_runtime_folder(monkeypatch: pytest.MonkeyPatch, runtime: str) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    expected = Path(tempfile.gettempdir(), f"xllm-{os.getuid()}", "xllm.sock")
    assert default_endpoint() == Endpoint(path=expected)


def test_default_socket_in_another_users_folder_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "xllm").mkdir()
    owner = (tmp_path / "xllm").stat().st_uid
    if owner == 0:  # root's folders are trusted by everyone, so give this one to somebody
        os.chown(tmp_path / "xllm", 12345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(PermissionError, match="belongs to user"):
        Client()


def test_a_token_never_crosses_a_network_in_plain_text() -> None:
    with pytest.raises(ValueError, match="tls="):
        Client("gpu-7.example.org:50051", token="secret")
    Client("127.0.0.1:50051", token="secret").close()


def test_tls_on_a_unix_socket_is_refused() -> None:
    with pytest.raises(ValueError, match="TLS is for TCP"):
        Client("unix:/run/x.sock", tls=Tls())
