"""The `xllm` command: its verbs and its exit codes.

Verbs import what is heavy (gRPC, the engine, rich) inside their functions, so that `xllm --help` is quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from xllm_service.cli import bench, chat, generate, inspect, pull, run, serve, tokenize, top

DONE, FAILED, BAD_USAGE, INTERRUPTED, UNREAD = 0, 1, 2, 130, 141
_EXIT_CODES = "Exit codes: 0 done, 1 failed, 2 bad usage, 130 interrupted, 141 nobody reads the output any more."


class _UnreadError(Exception):
    """Nobody reads stdout any more."""


class _Verbs(TyperGroup):
    """Ends every failure as one line on stderr and an exit code, never as a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run a verb; a pipe that has ended is told from other failures before the library makes one of it."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise _UnreadError from None

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        arguments = list(sys.argv[1:] if args is None else args)
        try:
            code = super().main(arguments, "xllm", complete_var, standalone_mode=False, **extra) or DONE
        except typer.TyperException as error:
            # No verb at all: the help was printed, and its exception is empty.
            code = _complain(_usage(error), error.exit_code) if error.format_message() else error.exit_code
        except (typer.Abort, KeyboardInterrupt):
            code = INTERRUPTED
        except _UnreadError:
            code = _unread()
        except Exception as error:
            code = _failed(error, with_traceback="--traceback" in arguments)
        if standalone_mode:
            sys.exit(code)
        return code


def _usage(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "xllm"
    message = " ".join(error.format_message().split()).rstrip(".")
    return f"{message}; see `{command} --help`"


def _unread() -> int:
    """End as others do whose reader has had enough, as in `xllm generate ... | head`: without a word."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed
    return UNREAD


def _failed(error: Exception, *, with_traceback: bool) -> int:
    from xllm_service.cli import failures

    if with_traceback:
        raise error
    failure = failures.describe(error)
    return _complain(failure.message, BAD_USAGE if failure.is_usage else FAILED)


def _complain(message: str, code: int) -> int:
    typer.echo(f"xllm: {message}", err=True)
    return code


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"xllm {version('xllm')}")
        raise typer.Exit


app = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog=_EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", callback=_print_version, is_eager=True)
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where in the code a failure comes from.")
    ] = False,
) -> None:
    """Run GGUF language models from their quantised blocks, and stream tokens over gRPC."""


for _verb in (serve, generate, chat, run, pull, inspect, tokenize, bench, top):
    _verb.register(app)


def main() -> None:
    """Run the command line and end the process."""
    app()
