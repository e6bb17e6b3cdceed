"""`xllm tokenize MODEL [TEXT | -]`: ids and pieces of a text."""

from __future__ import annotations

from typing import Annotated

import typer

from xllm_service.cli import options


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command()(tokenize)


def tokenize(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A .gguf file, which may hold only a vocabulary, or a name that `xllm pull` knows.",
            show_default=False,
        ),
    ],
    text: Annotated[
        str, typer.Argument(metavar="TEXT|-", help="The text; - or none reads it from stdin.", show_default=False)
    ] = "-",
    as_json: Annotated[bool, typer.Option("--json", help='Print {"ids": [...], "pieces": [...]}.')] = False,
    no_bos: Annotated[
        bool, typer.Option("--no-bos", help="Add nothing around the text; by default what the vocabulary asks for.")
    ] = False,
    parse_special: Annotated[
        bool, typer.Option("--parse-special", help="Control tokens written out in the text become those tokens.")
    ] = False,
    pretokenizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Stands in for the file's tokenizer.ggml.pre.", show_default=False),
    ] = None,
) -> None:
    """Print the token ids of a text, each with its piece."""
    import json

    from xllm_service.cli.terminal import for_terminal, progress
    from xllm_service.models import resolve_model

    content = options.read_text(text)
    with progress() as report:
        path = resolve_model(model, report)

    from xllm_service.engine import open_model

    with open_model(path, pretokenizer=pretokenizer) as opened:
        ids = opened.encode(content, add_special=not no_bos, parse_special=parse_special)
        # Bytes that are no whole character appear as U+FFFD here; the ids say exactly what they are.
        pieces = [opened.piece(token_id).decode("utf-8", "replace") for token_id in ids]
    if as_json:
        typer.echo(json.dumps({"ids": ids, "pieces": pieces}, ensure_ascii=False))
        return
    for token_id, piece in zip(ids, pieces, strict=True):
        typer.echo(f"{token_id:>8}  {for_terminal(piece)!r}")
