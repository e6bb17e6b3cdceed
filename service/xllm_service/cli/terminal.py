"""What goes to the terminal, and how: text as it comes, and progress bars for long work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# C0 and C1 controls but tab and newline become visible: a model's answer must not be able to drive the terminal.
_VISIBLE = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"}
_VISIBLE |= {0x7F: "\u2421"} | {code: "\ufffd" for code in range(0x80, 0xA0)}


def for_terminal(text: str) -> str:
    """Return the text with its control characters made visible."""
    return text.translate(_VISIBLE)


def stream_text(text: str) -> None:
    """Write text to stdout at once; unchanged, unless stdout is a terminal."""
    sys.stdout.write(for_terminal(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def say(line: str) -> None:
    """Write a line to stderr, where it does not mix with results."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """Give a function (what, done, total) that draws bars on stderr; no terminal there: a line for each step."""
    if sys.stderr.isatty():
        with _bars() as report:
            yield report
        return
    said: set[str] = set()

    def report_line(what: str, done: int, total: int) -> None:
        if what not in said:
            said.add(what)
            say(f"xllm: {what}" + (f" {total / 1e6:.1f} MB" if total else ""))

    yield report_line


@contextmanager
def _bars() -> Iterator[Callable[[str, int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total or None)
            bars.update(tasks[what], completed=done)

        yield report


def milliseconds(seconds: float) -> str:
    """Return a time for people: three significant digits, in ms."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds * 1e3:.0f} ms"
