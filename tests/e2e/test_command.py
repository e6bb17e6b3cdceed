"""The command as a process among others: closed streams, pipes that end, signals that come early, ports in use."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.serving import server_process, stop
from xllm_client import Client

XLLM = [sys.executable, "-m", "xllm_service"]


def shell(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", script, "bash", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_reader_that_has_had_enough_ends_it_without_a_word(endless_model: Path) -> None:
    script = '"$@" run "$MODEL" x --max-tokens 5000 | head -c 3; echo " ${PIPESTATUS[0]}"'
    done = shell(f"MODEL={endless_model}; {script}", *XLLM)
    assert done.stdout == "CCC 141\n"
    assert "xllm:" not in done.stderr and "Traceback" not in done.stderr and "Exception" not in done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_do_no_harm(endless_model: Path, tmp_path: Path, closed: str) -> None:
    endpoint = f"unix:{tmp_path}/c/x.sock"
    command = [*XLLM, "serve", str(endless_model), "--listen", endpoint]
    process = subprocess.Popen(["bash", "-c", f'exec "$@" {closed}', "bash", *command])
    try:
        with Client(endpoint) as client:
            client.wait_ready(60)
            assert client.generate_once("x", max_tokens=3).text == "CCC"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_a_signal_that_comes_before_anything_is_imported_is_an_orderly_end() -> None:
    code = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "xllm_service.cli.main":
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Finder())
sys.argv = ["xllm", "serve", "model.gguf"]
from xllm_service.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_port_in_use_is_told_in_one_line(endless_model: Path, tmp_path: Path) -> None:
    with server_process(endless_model, tmp_path, "--health", "127.0.0.1:0") as (process, _):
        process.send_signal(signal.SIGSTOP)
        process.send_signal(signal.SIGCONT)
        code, log = stop(process)
    assert code == 0 and "health checks on 127.0.0.1:" in log
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run(
            [*XLLM, "serve", str(endless_model), "--listen", address, "--log-level", "error"],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"xllm: --listen {address}: cannot listen there")


def test_every_line_of_the_log_has_its_form_and_level(endless_model: Path, tmp_path: Path) -> None:
    with server_process(endless_model, tmp_path, "--log-format", "json") as (process, _):
        _, log = stop(process)
    lines = [json.loads(line) for line in log.splitlines()]
    assert any(line["message"].startswith("backend: ") and line["level"] == "info" for line in lines)
    with server_process(endless_model, tmp_path, "--log-level", "warning") as (process, _):
        assert stop(process) == (0, "")


def test_numbers_and_names_are_those_of_the_command_line(endless_model: Path) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [*XLLM, "run", str(endless_model), "x", *arguments], capture_output=True, text=True, timeout=60, check=False
        )
        return done.returncode, done.stderr

    code, said = run("--max-tokens", "0")
    assert code == 2 and "--max-tokens" in said
    code, said = run("--max-seq-len", "1000000")
    assert code == 2 and "--max-seq-len" in said and "--allow-long-context" in said
    code, said = run("--memory-limit", "1MB", "--max-tokens", "1")
    assert code == 1 and "--memory-limit" in said and "memory_limit" not in said
