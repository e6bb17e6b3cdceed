"""A process for work of strangers: what ends it, and whose fault that was."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from xllm_service import sandbox as module
from xllm_service.sandbox import Sandbox, SandboxUnavailableError, TooMuchError

PROGRAM = """
import sys
sys.path.append(sys.argv[1])
from xllm_service.sandbox_child import limited, serve

def prepare():
    {prepare}
    def answer(message):
        if message == "work for ever":
            with limited(0.05):
                while True: pass
        if message == "take memory":
            return len(bytearray(1 << 32))
        if message == "nest":
            return answer("nest")
        if message == "crash":
            import os, signal
            os.kill(os.getpid(), signal.SIGSEGV)
        if message == "be killed":
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)
        if message == "fail":
            raise ValueError("a bug of ours")
        return [message, sys.flags.isolated]
    return answer

serve(prepare, memory_bytes=1 << 30)
"""

Make = Callable[..., Sandbox]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Sandbox] = []

    def start(prepare: str = "pass", library: str = "minijinja", **options: object) -> Sandbox:
        program = tmp_path / "program.py"
        program.write_text(PROGRAM.format(prepare=prepare))
        made.append(Sandbox("does what a test wants", program, library, **options))  # type: ignore[arg-type]
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.mark.parametrize("work", ["work for ever", "take memory", "nest", "crash"])
def test_work_that_takes_too_much_ends_the_process_and_the_next_one_finds_another(make: Make, work: str) -> None:
    sandbox = make()
    with pytest.raises(TooMuchError):
        sandbox.ask(work)
    assert sandbox.process_id is None
    assert sandbox.ask("x") == ["x", 1]


def test_a_large_message_and_a_large_answer_pass(make: Make) -> None:
    text = "é" * 3_000_000
    assert make().ask(text)[0] == text


@pytest.mark.parametrize(
    ("prepare", "library", "cause"),
    [
        ("import no_such_module_at_all", "minijinja", r"does not start: ModuleNotFoundError \(no_such_module_at_all\)"),
        ("raise OSError('/a/path/of/the/server')", "minijinja", r"does not start: OSError;"),
        ("import os; os._exit(9)", "minijinja", "ended with exit status 9 before it was ready"),
        ("import os; os.kill(os.getpid(), 11)", "minijinja", "was ended by SIGSEGV before it was ready"),
        ("pass", "no_such_package_at_all", "does not start: no_such_package_at_all is not installed"),
    ],
)
def test_a_process_that_dies_before_it_is_ready_is_no_fault_of_the_work(
    make: Make, prepare: str, library: str, cause: str
) -> None:
    sandbox = make(prepare, library)
    for _ in range(2):
        with pytest.raises(SandboxUnavailableError, match=cause) as caught:
            sandbox.ask("x")
        assert "/a/path" not in str(caught.value) and "retry later" in str(caught.value)


def test_a_process_that_cannot_be_started_says_why(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    sandbox = make()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", no_memory)
        with pytest.raises(SandboxUnavailableError, match="does not start: Cannot allocate memory"):
            sandbox.ask("x")
    assert sandbox.ask("x") == ["x", 1]


def test_a_process_that_is_never_ready_is_given_up(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_START_S", 0.05)
    with pytest.raises(SandboxUnavailableError, match=r"was not ready in 0\.05 s"):
        make("import signal; signal.pause()").ask("x")


def test_a_process_that_waits_without_an_answer_is_ended_and_followed_by_another(make: Make) -> None:
    sandbox = make()
    sandbox.ask("x")
    process = sandbox._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    sandbox.answer_s = 0.05
    with pytest.raises(SandboxUnavailableError, match=r"gave no answer in 0\.05 s; retry later"):
        sandbox.ask("x")
    assert process.returncode == -signal.SIGKILL
    sandbox.answer_s = 30
    assert sandbox.ask("x") == ["x", 1]


def test_one_that_was_killed_while_nothing_was_asked_of_it_is_replaced(make: Make) -> None:
    sandbox = make()
    sandbox.ask("x")
    process = sandbox._process
    assert process is not None
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert sandbox.ask("y") == ["y", 1]


@pytest.mark.parametrize(("work", "how"), [("be killed", "was ended by SIGKILL"), ("fail", "ended with exit status 1")])
def test_one_that_was_killed_or_failed_at_its_work_says_nothing_about_the_work(make: Make, work: str, how: str) -> None:
    sandbox = make()
    with pytest.raises(SandboxUnavailableError, match=f"{how}; retry later"):
        sandbox.ask(work)
    assert sandbox.ask("x") == ["x", 1]


def test_each_process_gets_the_opening_message_first(make: Make) -> None:
    sandbox = make(opening={"a": 1})
    assert sandbox.open() == [{"a": 1}, 1] == sandbox.open()
    with pytest.raises(TooMuchError):
        sandbox.ask("nest")
    assert sandbox.ask("x") == ["x", 1] and sandbox.open() == [{"a": 1}, 1]
    costly = make(opening="nest")
    with pytest.raises(TooMuchError):
        costly.ask("x")


def test_a_message_that_is_no_json_leaves_the_process_as_it_is(make: Make) -> None:
    sandbox = make()
    sandbox.ask("x")
    before = sandbox.process_id
    with pytest.raises(TypeError):
        sandbox.ask(object())
    assert sandbox.ask("x") == ["x", 1] and sandbox.process_id == before


def test_closing_leaves_no_process_and_no_descriptor(make: Make) -> None:
    before = len(os.listdir("/proc/self/fd"))
    sandbox = make()
    for _ in range(2):
        sandbox.ask("x")
        sandbox.close()
        sandbox.close()
    assert len(os.listdir("/proc/self/fd")) == before
