"""The `xllm` command, also as `python -m xllm_service`: what has to be right before anything is imported."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any


def main() -> None:
    """Run the command line and end the process."""
    _open_closed_streams()
    if next((word for word in sys.argv[1:] if not word.startswith("-")), "") == "serve":
        # Imports take a moment, and a supervisor that changes its mind meanwhile gets an orderly end too.
        signal.signal(signal.SIGTERM, _leave)
        # gRPC writes lines of its own past our log; who wants them says so.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        if _listens_on_unix_sockets_alone(sys.argv[1:]):
            # Its usual way of waiting wakes a thread whenever a client has read from such a socket: for each token.
            os.environ.setdefault("GRPC_POLL_STRATEGY", "poll")
    from xllm_service.cli.main import main as run

    run()


def _listens_on_unix_sockets_alone(words: Sequence[str]) -> bool:
    """Whether the command line says so; what a file or the environment says is not looked at, so then it is no."""
    if "XLLM_LISTEN" in os.environ or any(word.partition("=")[0] == "--config" for word in words):
        return False
    values = [after for word, after in itertools.pairwise((*words, "")) if word == "--listen"]
    values += [word.partition("=")[2] for word in words if word.startswith("--listen=")]
    return all(value.startswith("unix:") for value in values)


def _leave(_number: int, _frame: Any) -> None:
    raise SystemExit(0)


def _open_closed_streams() -> None:
    """Put the null device where stdin, stdout or stderr was closed: else the next open file is taken for it."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
        setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # for as long as the process lives


if __name__ == "__main__":
    main()
