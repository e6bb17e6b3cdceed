"""A fault in a mapped file: one line and an exit where the file has lost its bytes, and the usual death elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import ctypes, mmap, os, sys, threading
import cyengine
cyengine.exit_on_lost_file(2, 7)
cyengine.exit_on_lost_file(2, 7)  # again: the same
with open(sys.argv[1], "r+b") as file:
    bytes = mmap.mmap(file.fileno(), 0)
what = sys.argv[2]
if what == "shortened":
    os.truncate(sys.argv[1], 100)
    print(bytes[50])  # the last page that has something behind it
    reader = threading.Thread(target=lambda: print(bytes[9000]))
    reader.start()
    reader.join()
elif what == "shortened for many":
    start = threading.Barrier(16)
    at = ctypes.addressof(ctypes.c_char.from_buffer(bytes, 9000))
    find = ctypes.CDLL(None).memchr  # without the interpreter's lock
    find.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    os.truncate(sys.argv[1], 100)
    readers = [threading.Thread(target=lambda: (start.wait(), find(at, 1, 100))) for _ in range(16)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
elif what == "raised":
    os.kill(os.getpid(), 7)
print("alive")
"""


def run(path: Path, what: str) -> subprocess.CompletedProcess[str]:
    path.write_bytes(b"x" * 20_000)
    command = [sys.executable, "-c", PROGRAM, str(path), what]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", ["model.gguf", "a name with spaces", "a\nline"])
def test_a_file_that_lost_its_bytes_is_named_and_ends_the_process(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    ended = run(folder / name, "shortened")
    assert ended.returncode == 7, ended.stderr
    assert ended.stdout == "" or "alive" not in ended.stdout
    (line,) = ended.stderr.splitlines()
    shown = name.replace("\n", "\\012")  # as the kernel writes it
    assert line.startswith(f"xllm: the mapped file {shown} has been shortened while it was in use")
    assert str(folder) not in line


def test_many_threads_that_find_it_out_at_once_say_so_once(tmp_path: Path) -> None:
    for _ in range(6):
        ended = run(tmp_path / "model.gguf", "shortened for many")
        assert ended.returncode == 7, ended.stderr
        assert ended.stderr.count("mapped file model.gguf has been shortened") == ended.stderr.count("mapped file") == 1


def test_a_signal_that_is_no_such_fault_ends_it_as_ever(tmp_path: Path) -> None:
    ended = run(tmp_path / "f", "raised")
    assert ended.returncode == -signal.SIGBUS, ended.stderr
    assert "shortened" not in ended.stderr


def test_nothing_happens_to_a_file_that_is_whole(tmp_path: Path) -> None:
    ended = run(tmp_path / "f", "nothing")
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, "alive", "")
    assert os.path.getsize(tmp_path / "f") == 20_000
