"""How much processor time each thread of a process has, while something runs."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import TracebackType
from typing import Self

_INTERVAL_S = 0.1  # between two looks


Threads = dict[tuple[str, str], float]  # seconds by id and name


def thread_seconds(pid: int) -> Threads:
    """Return the seconds of every thread there is; the name of the main thread is "main"."""
    seconds: Threads = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            name = "main" if task.name == str(pid) else (task / "comm").read_text().strip()
            seconds[task.name, name] = _seconds(task)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
    return seconds


def _seconds(task: Path) -> float:
    exact = task / "schedstat"
    if exact.exists():
        return int(exact.read_text().split()[0]) / 1e9
    fields = (task / "stat").read_text().rpartition(")")[2].split()  # where there is no better: in clock ticks
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class ThreadWatch:
    """Looks at the threads of a process while the `with` statement runs."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._looks: list[tuple[float, Threads]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="thread-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def cores(self, begin: float, end: float) -> dict[str, float]:
        """Return, by thread name, how many cores' worth of time each had between two monotonic times, most first."""
        inside = [look for look in self._looks if begin <= look[0] <= end]
        if len(inside) < 2:
            return {}
        spent: defaultdict[str, float] = defaultdict(float)
        for (_, before), (_, after) in itertools.pairwise(inside):
            for thread, value in after.items():
                spent[thread[1]] += value - before.get(thread, 0.0)
        took_s = inside[-1][0] - inside[0][0]
        return {name: value / took_s for name, value in sorted(spent.items(), key=lambda one: -one[1])}

    def _watch(self) -> None:
        while not self._is_over.wait(_INTERVAL_S):
            self._looks.append((time.monotonic(), thread_seconds(self._pid)))
