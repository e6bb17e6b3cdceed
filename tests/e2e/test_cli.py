"""The `xllm` command as a user runs it: real processes, the demo model, a real server on a unix socket."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import xllm_client

XLLM = (sys.executable, "-m", "xllm_service")


def xllm(
    *arguments: str, stdin: str = "", environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*XLLM, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **(environment or {})},
    )


def done(*arguments: str, stdin: str = "", environment: dict[str, str] | None = None) -> str:
    """Return what a command that succeeds prints on stdout."""
    result = xllm(*arguments, stdin=stdin, environment=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[dict[str, str]]:
    """A server on the default socket of an environment of its own; yields that environment."""
    folder = tmp_path_factory.mktemp("run")
    folder.chmod(0o700)
    environment = {"XDG_RUNTIME_DIR": str(folder)}
    log = folder / "serve.log"
    with log.open("wb") as sink:
        server = subprocess.Popen(
            [*XLLM, "serve", str(demo_model), "--max-slots", "2"], stderr=sink, env={**os.environ, **environment}
        )
    try:
        with xllm_client.Client(f"unix:{folder}/xllm/xllm.sock") as client:
            client.wait_ready(30)
        yield environment
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0, log.read_text()
    text = log.read_text()
    assert "max-slots = 2 (--max-slots)" in text
    assert f"listening on unix:{folder}/xllm/xllm.sock" in text


def load(environment: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done("top", "--once", "--json", environment=environment))
    return found


def test_pull_prints_the_path_last_and_at_once(demo_model: Path) -> None:
    result = xllm("pull", "smollm2-135m")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{demo_model}\n", "")


def test_server_and_process_give_the_same_bytes(demo_model: Path, runtime: dict[str, str]) -> None:
    arguments = ("The capital of France is", "--max-tokens", "24")
    served = xllm("generate", *arguments, environment=runtime)
    assert served.returncode == 0, served.stderr
    assert served.stdout.startswith(" Paris")
    assert "TTFT" in served.stderr
    assert "step time" in served.stderr
    assert done("run", str(demo_model), *arguments) == served.stdout
    sampled = (*arguments, "--temperature", "0.9", "--seed", "11", "--top-k", "40")
    assert done("generate", *sampled, environment=runtime) == done("run", str(demo_model), *sampled)


def test_a_message_gets_an_answer(runtime: dict[str, str]) -> None:
    question = ("generate", "What is 2+2?", "--chat", "--max-tokens", "32", "--json")
    found = json.loads(done(*question, environment=runtime))
    assert "4" in found["text"]
    assert found["finish_reason"] == "EOS"
    assert found["num_generated_tokens"] > 1
    assert found["ttft_ms"] > 0
    assert found["step_ms"] > 0


def test_a_conversation_goes_on(demo_model: Path, runtime: dict[str, str]) -> None:
    lines = "Hello!\nWhat is 2+2?\n"
    answers = done("chat", "--max-tokens", "16", "--json", stdin=lines, environment=runtime).splitlines()
    first, second = map(json.loads, answers)
    assert second["num_prompt_tokens"] > first["num_prompt_tokens"] + first["num_generated_tokens"]
    assert second["num_cached_tokens"] % 64 == 0
    local = done("run", str(demo_model), "--max-tokens", "16", "--json", stdin=lines).splitlines()
    assert [json.loads(line)["text"] for line in local] == [first["text"], second["text"]]


def test_stop_and_stdin(runtime: dict[str, str]) -> None:
    text = done(
        "generate", "-", "--max-tokens", "24", "--stop", ".", stdin="The capital of France is", environment=runtime
    )
    assert text == " Paris\n"


def test_an_interrupt_cancels_and_gives_the_slot_back(runtime: dict[str, str]) -> None:
    process = subprocess.Popen(
        [*XLLM, "generate", "Once upon a time", "--max-tokens", "4000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **runtime},
    )
    assert process.stdout is not None
    assert process.stdout.read(20)  # it streams
    assert load(runtime)["slots_used"] == 1
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert b"Traceback" not in err
    wait_until_idle(runtime)


def test_a_closed_pipe_ends_it_quietly(runtime: dict[str, str]) -> None:
    process = subprocess.Popen(
        [*XLLM, "generate", "Once upon a time", "--max-tokens", "4000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **runtime},
    )
    assert process.stdout is not None
    assert process.stdout.read(5)
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(30) == 141
    assert err == b""
    wait_until_idle(runtime)


def wait_until_idle(environment: dict[str, str]) -> None:
    deadline = time.monotonic() + 30
    while load(environment)["slots_used"]:
        assert time.monotonic() < deadline, "the slot was not given back"


def test_a_wrong_field_is_bad_usage_and_a_long_prompt_is_not(runtime: dict[str, str]) -> None:
    wrong = xllm("generate", "x", "--top-p", "7", environment=runtime)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "top_p" in wrong.stderr
    long = xllm("generate", "-", stdin="word " * 9000, environment=runtime)
    assert (long.returncode, long.stdout) == (1, "")
    assert "PROMPT_TOO_LONG" in long.stderr
    assert len(long.stderr.splitlines()) == 1


def test_a_second_server_on_the_same_socket_is_refused(demo_model: Path, runtime: dict[str, str]) -> None:
    result = xllm("serve", str(demo_model), environment=runtime)
    assert result.returncode == 1
    assert "another server listens there" in result.stderr.splitlines()[-1]


def test_tokenize_prints_the_ids_of_the_demo_model(demo_model: Path) -> None:
    found = json.loads(done("tokenize", str(demo_model), "Hello <|im_end|>", "--json"))
    assert found["ids"][0] == 19556
    assert 2 not in found["ids"]
    assert "".join(found["pieces"]) == "Hello <|im_end|>"
    special = json.loads(done("tokenize", str(demo_model), "-", "--json", "--parse-special", stdin="Hello <|im_end|>"))
    assert special["ids"][-1] == 2


def test_inspect_describes_the_demo_model(demo_model: Path) -> None:
    found = json.loads(done("inspect", str(demo_model), "--json", "--max-slots", "4"))
    assert found["model"]["architecture"] == "llama"
    assert {row["type"]: row["num_tensors"] for row in found["tensor_types"]} == {"q4_1": 210, "q8_0": 1, "f32": 61}
    assert {token["token_id"] for token in found["end_tokens"]} == {0, 2}
    assert all(fact["source"] for fact in found["facts"])
    assert found["plan"]["kv_bytes_per_token"] == 30 * 2 * 3 * 64 * 2
    assert found["plan"]["fits"]


def test_bench_measures_the_demo_model(demo_model: Path) -> None:
    arguments = ("--batch", "1,2", "--prompt-tokens", "16", "--gen-tokens", "24", "--cap", "128", "--json", "-")
    found = json.loads(done("bench", str(demo_model), *arguments))
    assert len(found["rows"]) == 2
    for row in found["rows"]:
        assert "error" not in row
        assert row["decode_mode"] == "batched"
        assert row["path"].startswith(f"{row['backend']}/")
        assert row["n_steps"] == 12
        assert 0 < row["step_ms"] <= row["step_ms_p90"]
        assert row["kv_bytes"] == row["bs"] * 28 * 23040
    assert found["machine"]["device"]


def test_a_model_that_is_damaged_is_one_line(demo_model: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    with demo_model.open("rb") as file:
        cut.write_bytes(file.read(1_000_000))
    for verb in ("inspect", "run", "serve"):
        result = xllm(verb, str(cut), "x") if verb == "run" else xllm(verb, str(cut))
        assert result.returncode == 1
        *_, line = result.stderr.splitlines()
        assert line.startswith("xllm: ")
        assert "Traceback" not in result.stderr
