"""Log lines on stderr, for people or for programs. No line holds a secret, nor a prompt or an answer unless asked for.

Code passes facts as keywords of `extra={"facts": {...}}`; the formatter prints them after the text, or as JSON fields.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, TextIO

LOGGER = "xllm"


def get_logger(name: str) -> logging.Logger:
    """Return the logger of one part of the service."""
    return logging.getLogger(f"{LOGGER}.{name}")


def facts(**values: object) -> dict[str, Any]:
    """Return what to pass as `extra` so that the line carries these facts."""
    return {"facts": values}


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock}.{int(record.msecs):03d} {record.levelname.lower():7} {_one_line(record.getMessage())}"
        values = _facts(record)
        if values:
            line += "  " + " ".join(f"{key}={_one_line(str(value))}" for key, value in values.items())
        return line if not record.exc_info else f"{line}\n{self.formatException(record.exc_info)}"


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_facts(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)


def configure(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Send the service's log to `stream` (default: stderr). Calling it again replaces what was set."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    logger = logging.getLogger(LOGGER)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


class Notices:
    """A descriptor whose lines become log lines, for code that can only write: until `close`.

    Args:
        name: the part of the service that they are logged under.
    """

    def __init__(self, name: str) -> None:
        read_end, self.fd = os.pipe()
        self._thread = threading.Thread(target=_log_lines, args=(read_end, get_logger(name)), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Log what has been written, and end."""
        os.close(self.fd)
        self._thread.join()


def _log_lines(descriptor: int, logger: logging.Logger) -> None:
    with open(descriptor, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            logger.info("%s", line.rstrip("\n"))


def _facts(record: logging.LogRecord) -> Mapping[str, object]:
    values = getattr(record, "facts", {})
    return values if isinstance(values, Mapping) else {}


def _one_line(text: str) -> str:
    # What a peer or a file wrote must not be able to forge a line.
    return text.replace("\r", "\\r").replace("\n", "\\n")
