"""`xllm serve MODEL`: a server, until SIGTERM or SIGINT."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xllm_service.cli import options, settings

if TYPE_CHECKING:
    from xllm_service.config import ServeConfig


_GARBAGE_OBJECTS = 10_000  # that may lie about before cycles among them are looked for: about a megabyte


def register(app: typer.Typer) -> None:
    """Add the verb."""
    settings.register(app, serve)


def serve(
    model: options.ModelArgument,
    *,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A TOML file of settings: `max-slots = 4`, ...", show_default=False),
    ] = None,
    settings: Mapping[str, Any],
) -> None:
    """Serve a model over gRPC, until SIGTERM or SIGINT.

    Every setting can also be given in the environment (XLLM_MAX_SLOTS=4) or in the file of --config. Flags win over the
    environment, and that over the file; what is in effect is printed at the start.
    """
    import asyncio
    import os

    from xllm_service.cli.terminal import progress
    from xllm_service.config import load_config
    from xllm_service.models import CATALOGUE, resolve_model

    load_config(model, settings, config_file=config, environ=os.environ)  # what is wrong shows before a long download
    with progress() as report:
        path = resolve_model(model, report)
    known_as = model if model in CATALOGUE else ""
    in_effect = load_config(path, settings, config_file=config, environ=os.environ, default_name=known_as)

    from xllm_service import app, logs
    from xllm_service.cli.failures import Failure
    from xllm_service.engine import exit_on_lost_file

    exit_on_lost_file()
    logs.configure(in_effect.log_level, in_effect.log_format)
    print_settings(in_effect)
    try:
        asyncio.run(app.serve(in_effect, on_ready=lambda _: keep_what_is_there()))
    except app.StartError as error:
        raise Failure(str(error)) from error


def keep_what_is_there() -> None:
    """Leave what has been made by now to the end of the process.

    Looking through all of it for cycles takes milliseconds, in which no token goes out.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GARBAGE_OBJECTS, 20, 20)


def print_settings(config: ServeConfig) -> None:
    """Log what is in effect: a line for each setting that was made, and one for all that were not."""
    from xllm_service import logs

    log = logs.get_logger("config")
    defaults = []
    for line in config.describe():
        if line.endswith(" (default)"):
            defaults.append(line.removesuffix(" (default)"))
        else:
            log.info("%s", line)
    log.info("by default: %s", ", ".join(defaults))
