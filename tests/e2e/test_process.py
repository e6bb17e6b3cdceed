"""The server as a process: how it starts, refuses to start, and ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.e2e.serving import server_process, stop
from xllm_client import NO_RETRY, Client, UnavailableError, XllmError


def serve_once(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "xllm_service", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_sigterm_lets_twenty_streams_finish_and_exits_with_zero(endless_model: Path, tmp_path: Path) -> None:
    flags = ("--max-slots", "20", "--kv-memory", "64MiB", "--drain-grace", "60")
    with (
        server_process(endless_model, tmp_path, *flags) as (process, endpoint),
        Client(endpoint, retry=NO_RETRY) as client,
    ):
        streams = [client.generate("x", max_tokens=400) for _ in range(20)]
        for stream in streams:
            next(stream)
        texts: list[str] = []
        readers = [threading.Thread(target=lambda s=stream: texts.append(s.result().text)) for stream in streams]
        process.send_signal(signal.SIGTERM)
        with pytest.raises(UnavailableError):
            while True:
                client.tokenize("x")
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        assert texts == ["C" * 400] * 20
        _, log = process.communicate(timeout=60)
        assert process.returncode == 0, log
        assert not (tmp_path / "p" / "x.sock").exists()


def test_a_second_signal_ends_at_once(endless_model: Path, tmp_path: Path) -> None:
    with server_process(endless_model, tmp_path) as (process, endpoint), Client(endpoint, retry=NO_RETRY) as client:
        stream = client.generate("x", max_tokens=100_000)
        next(stream)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(UnavailableError):
            while True:
                client.tokenize("x")
        assert process.poll() is None, "it waits for the stream"
        code, log = stop(process, signal.SIGINT)
        assert code == 0, log
        with pytest.raises(UnavailableError):
            stream.result()


def test_a_second_server_is_refused_and_a_stale_socket_replaced(endless_model: Path, tmp_path: Path) -> None:
    with server_process(endless_model, tmp_path) as (process, endpoint):
        second = serve_once(str(endless_model), "--listen", endpoint)
        assert second.returncode == 1
        assert "another server listens there" in second.stderr
        with Client(endpoint) as client:
            assert client.generate_once("x", max_tokens=2).text == "CC"
        process.kill()
        process.wait()
    assert (tmp_path / "p" / "x.sock").is_socket(), "killed, it leaves its socket behind"
    with server_process(endless_model, tmp_path) as (_, endpoint), Client(endpoint) as client:
        assert client.generate_once("x", max_tokens=2).text == "CC"


def test_a_file_that_is_no_model_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF")
    done = serve_once(str(path), "--listen", f"unix:{tmp_path}/x.sock")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "x.sock").exists()


def test_prompts_and_answers_are_logged_where_that_is_asked_for(endless_model: Path, tmp_path: Path) -> None:
    with server_process(endless_model, tmp_path, "--log-prompts", "--log-format", "json") as (process, endpoint):
        with Client(endpoint) as client:
            client.generate_once("line\ntwo", max_tokens=3, request_id="r1")
        _, log = stop(process)
    lines = [json.loads(line) for line in log.splitlines()]
    said = {line["message"]: line["text"] for line in lines if line.get("request_id") == "r1"}
    assert said == {"prompt": "line\ntwo", "output": "CCC"}


def test_the_log_holds_no_prompt_and_no_answer(endless_model: Path, tmp_path: Path) -> None:
    with server_process(endless_model, tmp_path, "--log-level", "debug") as (process, endpoint):
        with Client(endpoint) as client:
            assert "CCCCCCCC" in client.generate_once("a very private matter", max_tokens=16).text
            with pytest.raises(Exception, match="temperature"):
                client.generate_once("a very private matter", temperature=-1.0)
        code, log = stop(process)
    assert code == 0
    assert "GenerateOnce" in log
    assert "private" not in log and "CCCCCCCC" not in log


def test_a_model_file_that_is_shortened_in_place_ends_the_server_in_words(random_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "in place.gguf"
    model.write_bytes(random_model.read_bytes())
    with server_process(model, tmp_path) as (process, endpoint), Client(endpoint, retry=NO_RETRY) as client:
        client.generate_once("the", max_tokens=2)
        os.truncate(model, 4096)
        with pytest.raises(XllmError):
            client.generate_once("another", max_tokens=2, timeout_s=60)
        _, log = process.communicate(timeout=60)
        assert process.returncode == 1, log
        assert "the mapped file in place.gguf has been shortened while it was in use" in log
        assert str(tmp_path) not in log.splitlines()[-1], "where it lies is the server's own business"


def test_a_model_file_that_is_replaced_by_renaming_does_no_harm(random_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(random_model.read_bytes())
    with server_process(model, tmp_path) as (process, endpoint), Client(endpoint, retry=NO_RETRY) as client:
        before = client.generate_once("the", max_tokens=2).text
        (tmp_path / "new").write_bytes(b"something else")
        (tmp_path / "new").replace(model)
        assert client.generate_once("the", max_tokens=2).text == before
        assert stop(process)[0] == 0
