"""`xllm pull NAME`: fetch a model."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command()(pull)


def pull(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="smollm2-135m (the demo model), or ORG/REPO[:FILE] on the Hugging Face hub, where FILE may be a part "
            "of one file's name such as Q4_K_M.",
            show_default=False,
        ),
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash a file that is already there, instead of comparing its size.")
    ] = False,
) -> None:
    """Fetch a model; the last line on stdout is its path."""
    from xllm_service.cli.terminal import progress
    from xllm_service.models import pull_model

    with progress() as report:
        path = pull_model(name, verify=verify, report=report)
    typer.echo(path)
