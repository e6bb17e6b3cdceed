"""`xllm serve MODEL`: a server, until SIGTERM or SIGINT."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from xllm_service.cli import options, settings


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
    environment, and that over the file; all of them are printed at the start.
    """
    import os

    from xllm_service.cli.terminal import progress
    from xllm_service.config import load_config
    from xllm_service.models import resolve_model

    load_config(model, settings, config_file=config, environ=os.environ)  # what is wrong shows before a long download
    with progress() as report:
        path = resolve_model(model, report)
    print(load_config(path, settings, config_file=config, environ=os.environ))
