"""The examples run as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fake_server import FakeServer

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(name: str, server: FakeServer, *arguments: str, text: str = "") -> str:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments, "--endpoint", server.endpoint]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_stream(server: FakeServer) -> None:
    assert run("stream.py", server) == "The capital of France is\n"


def test_chat_sends_the_whole_conversation(server: FakeServer) -> None:
    output = run("chat.py", server, text="Hi\nAgain\n")
    assert output == "> <user>Hi\n> <user>Hi<assistant><user>Hi<user>Again\n> "


def test_many(server: FakeServer) -> None:
    assert "'One, two,' -> 'One, two,' (9 tokens, EOS)" in run("many.py", server)


def test_inspect_server(server: FakeServer) -> None:
    output = run("inspect_server.py", server)
    assert "decode mode BATCHED" in output
    assert "ends at </s> (2): known name" in output


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_every_example_is_run_by_a_test_here(path: Path) -> None:
    assert f'"{path.name}"' in Path(__file__).read_text(encoding="utf-8")
