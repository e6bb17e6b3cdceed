"""`xllm chat`: a conversation with a server's model."""

from __future__ import annotations

from typing import Annotated

import typer

from xllm_service.cli import options


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command()(chat)


def chat(
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.", show_default=False)] = None,
    endpoint: options.Endpoint = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    token_file: options.TokenFile = None,
    tls: options.Tls = False,
    tls_ca: options.TlsCa = None,
    tls_cert: options.TlsCert = None,
    tls_key: options.TlsKey = None,
    as_json: options.JsonFlag = False,
) -> None:
    """Talk with a server's model; each line of stdin is a message."""
    from xllm_service.cli.conversation import converse
    from xllm_service.cli.served import ServedGeneration

    sampling = options.given(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop or None,
    )
    client = options.connect(
        endpoint, token_file=token_file, tls=tls, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key
    )
    with client:
        converse(lambda messages: ServedGeneration(client.chat(messages, **sampling)), system=system, as_json=as_json)
