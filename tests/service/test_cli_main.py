"""Exit codes, one-line failures, and flags: what every verb has in common."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from xllm_service.cli import failures, options
from xllm_service.cli.main import app
from xllm_service.config import SETTINGS
from xllm_service.errors import Reason, ServiceError

VERBS = ("serve", "generate", "chat", "run", "pull", "inspect", "tokenize", "bench", "top")


def run(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def test_help_lists_every_verb() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for verb in VERBS:
        assert re.search(rf"\b{verb}\b", result.stdout), verb


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str) -> None:
    result = run(verb, "--help")
    assert result.exit_code == 0, result.output
    assert "Usage: xllm " + verb in result.stdout


@pytest.mark.parametrize(
    ("words", "strategy"),
    [
        ("serve m.gguf", "poll"),
        ("serve m.gguf --listen unix:/a --listen=unix:/b", "poll"),
        ("serve m.gguf --listen unix:/a --listen 127.0.0.1:0", None),
        ("serve m.gguf --listen=127.0.0.1:0", None),
        ("serve m.gguf --config x.toml", None),
        ("generate m.gguf hello", None),
    ],
)
def test_grpc_polls_where_only_unix_sockets_are_listened_on(words: str, strategy: str | None) -> None:
    code = (
        "import os, sys\nfrom types import SimpleNamespace\n"
        "sys.modules['xllm_service.cli.main'] = SimpleNamespace(main=lambda: None)\n"
        "from xllm_service.__main__ import main\nmain()\nprint(os.environ.get('GRPC_POLL_STRATEGY'))"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("XLLM_", "GRPC_"))}
    command = [sys.executable, "-c", code, *words.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == str(strategy)


def test_help_loads_neither_grpc_nor_the_engine() -> None:
    code = (
        "import sys\nfrom xllm_service.cli.main import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('grpc', 'cyengine', 'huggingface_hub', 'minijinja') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


def test_version_is_the_package_s() -> None:
    assert re.fullmatch(r"xllm \d+\.\d+\.\d+\S*\n", run("--version").stdout)


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["pull"],
        ["pull", "a", "b"],
        ["pull", "--no-such-flag", "x"],
        ["generate", "x", "--max-tokens", "many"],
        ["generate", "x", "--max-tokens", "3000000000"],
        ["generate", "x", "--top-k", "99999999999999999999"],
        ["generate", "x", "--seed", "-1"],
        ["run", "m.gguf", "x", "--seed", "18446744073709551616"],
        ["generate", "x", "--system", "y"],
        ["generate", "x", "--endpoint", "nonsense"],
        ["generate", "x", "--token-file", "/no/such/file"],
        ["run", "x.gguf", "y", "--system", "z"],
        ["run", "x.gguf", "--threads", "-1"],
        ["serve", "x.gguf", "--max-slots", "0"],
        ["serve", "x.gguf", "--listen", "nowhere"],
        ["serve", "x.gguf", "--config", "/no/such/file"],
        ["inspect", "x.gguf", "--kv-type", "f64"],
        ["bench", "x.gguf", "--batch", "1,two"],
        ["bench", "x.gguf", "--kv-type", "f16,f64"],
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("xllm: ")


@pytest.mark.parametrize("verb", ["serve", "run", "inspect", "tokenize", "bench"])
def test_a_model_that_is_not_there_is_exit_code_1(verb: str) -> None:
    result = run(verb, "missing.gguf", stdin="x")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("xllm: missing.gguf: no such file; check the path")


@pytest.mark.parametrize("verb", [["generate", "x"], ["chat"], ["top", "--once"]])
def test_without_a_server_the_message_says_how_to_start_one(verb: list[str], tmp_path: Path) -> None:
    result = run(*verb, "--endpoint", f"unix:{tmp_path}/none.sock", stdin="hello\n")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert f"no xLLM server answers at unix:{tmp_path}/none.sock" in line
    assert "`xllm serve`" in line


def test_text_that_is_no_utf8_is_bad_usage() -> None:
    result = CliRunner().invoke(app, ["generate", "-"], input=b"a\xff")
    assert result.exit_code == 2
    assert "byte 1" in result.stderr
    with pytest.raises(failures.UsageError):
        options.read_text("a\udcff")


def test_a_fault_of_ours_is_one_line_unless_a_traceback_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setattr("xllm_service.models.pull_model", fail)
    result = run("pull", "x")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert "internal error: ZeroDivisionError: by zero" in line
    assert isinstance(run("--traceback", "pull", "x").exception, ZeroDivisionError)


def test_an_interrupt_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("xllm_service.models.pull_model", interrupt)
    assert run("pull", "x").exit_code == 130


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_becomes_one_line(reason: Reason) -> None:
    complaint = failures.describe(ServiceError(reason, "what\nhappened"))
    assert complaint.message.startswith("what happened")
    assert "\n" not in complaint.message
    assert complaint.is_usage == (reason is Reason.INVALID_FIELD)


def test_the_remedy_that_a_failure_names_wins() -> None:
    error = ServiceError(Reason.MEMORY, "does not fit", metadata={"remedy": "buy memory"})
    assert failures.describe(error).message == "does not fit; buy memory"
    assert "--kv-memory" in failures.describe(ServiceError(Reason.MEMORY, "does not fit")).message
    assert failures.describe(ServiceError(Reason.MEMORY, "too big; shrink it")).message == "too big; shrink it"
    assert failures.describe(ServiceError(Reason.QUEUE_FULL, "full")).message == "full; try again in 1 s"


# ---------------------------------------------------------------- settings as flags


def test_serve_has_a_flag_for_every_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    # A wide terminal, so that no flag is cut.
    monkeypatch.setenv("COLUMNS", "300")
    text = run("serve", "--help").stdout
    for setting in SETTINGS:
        assert setting.flag in text
        assert setting.help.split(".")[0] in text


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The configurations that `serve` would have run with."""
    configurations: list[Any] = []

    async def serve(config: Any, **_: Any) -> None:
        configurations.append(config)

    monkeypatch.setattr("xllm_service.app.serve", serve)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    return configurations


def test_flags_become_the_configuration(seen: list[Any], tmp_path: Path) -> None:
    result = run(
        *("serve", "m.gguf", "--max-slots", "3", "--allow-long-context", "--kv-memory", "1GiB"),
        *("--listen", f"unix:{tmp_path}/x.sock", "--listen", "localhost:0"),
    )
    assert result.exit_code == 0, result.output
    (config,) = seen
    assert (config.max_slots, config.allow_long_context, config.kv_memory) == (3, True, 1 << 30)
    assert [str(address) for address in config.listen] == [f"unix:{tmp_path}/x.sock", "localhost:0"]


def test_flags_win_over_the_environment_and_that_over_the_file(
    seen: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.toml").write_text("max-slots = 2\nmax-queue = 2\nthreads = 2\n")
    monkeypatch.setenv("XLLM_MAX_SLOTS", "3")
    monkeypatch.setenv("XLLM_MAX_QUEUE", "3")
    result = run("serve", "m.gguf", "--config", "c.toml", "--max-slots", "4")
    assert result.exit_code == 0, result.output
    assert (seen[0].max_slots, seen[0].max_queue, seen[0].threads) == (4, 3, 2)
    assert "max-slots = 4 (--max-slots)" in result.stderr
    assert "max-queue = 3 (XLLM_MAX_QUEUE)" in result.stderr
    assert "threads = 2 (c.toml)" in result.stderr
    assert "by default: " in result.stderr


def test_serve_and_the_clients_agree_on_the_default_address(seen: list[Any]) -> None:
    from xllm_client import Client, default_endpoint

    assert run("serve", "m.gguf").exit_code == 0
    assert seen[0].listen == (default_endpoint(),)
    with Client() as client:
        assert client.endpoint == str(default_endpoint())


def test_a_server_that_cannot_start_is_exit_code_1(seen: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from xllm_service import app as service_app

    async def serve(config: Any, **_: Any) -> None:
        raise service_app.StartError("somebody listens there; choose another --listen")

    monkeypatch.setattr("xllm_service.app.serve", serve)
    result = run("serve", "m.gguf")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "xllm: somebody listens there; choose another --listen"


def test_wrong_flags_show_before_a_model_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_: Any, **__: Any) -> Path:
        raise AssertionError("fetched")

    monkeypatch.setattr("xllm_service.models.resolve_model", fetch)
    assert run("serve", "smollm2-135m", "--max-slots", "0").exit_code == 2
    assert run("run", "smollm2-135m", "--threads", "x").exit_code == 2
