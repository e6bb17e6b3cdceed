"""Logits of the core's own forward pass, through the logits_cli program of tests/tools."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "build" / "dev" / "tests" / "tools" / "logits_cli"


class CoreLogits:
    """One model, loaded in a process of its own.

    Args:
        path: The model file.
        form: "raw" or "dequantized".
        num_threads: 0: the backend's choice.
        instruction_set: "best" or one by name.
        chunk: Prompt tokens per step.
        kv_type: "f16", "int8" or "int4"; for the raw form alone.
        program: logits_cli, built.
    """

    def __init__(
        self,
        path: str | Path,
        form: str = "raw",
        num_threads: int = 0,
        instruction_set: str = "best",
        chunk: int = 512,
        kv_type: str = "",
        program: str | Path = PROGRAM,
    ) -> None:
        if not Path(program).exists():
            raise FileNotFoundError(f"{program}: build it with `cmake --build build/dev --target logits_cli`")
        arguments = [str(program), str(path), form, str(num_threads), instruction_set, str(chunk)]
        if kv_type:
            arguments.append(kv_type)
        self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> Self:
        """Return the object."""
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        """End the process."""
        self.close()

    def close(self) -> None:
        """End the process; harmless when repeated."""
        self._process.communicate()

    def logits(self, ids: Sequence[int], first: int = 0) -> npt.NDArray[np.float32]:
        """Return the logits of the positions from `first` on, [len(ids) - first, vocab]."""
        assert self._process.stdin is not None
        self._process.stdin.write(struct.pack(f"<II{len(ids)}i", len(ids), first, *ids))
        self._process.stdin.flush()
        rows, vocab = struct.unpack("<II", self._read(8))
        return np.frombuffer(self._read(rows * vocab * 4), "<f4").reshape(rows, vocab)

    def _read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        if len(data) != size:
            raise RuntimeError(f"logits_cli ended with {self._process.wait()}")
        return data
