"""`xllm generate PROMPT`: one answer from a server."""

from __future__ import annotations

from typing import Annotated

import typer

from xllm_service.cli import options


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command()(generate)


def generate(
    prompt: Annotated[
        str,
        typer.Argument(metavar="PROMPT", help="The text to continue; - reads it from stdin.", show_default=False),
    ],
    chat: Annotated[bool, typer.Option("--chat", help="PROMPT is a message: apply the model's chat template.")] = False,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="With --chat: the system message.", show_default=False)
    ] = None,
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
    """Continue a text on a server, and stream the answer; TTFT and step time go to stderr."""
    import time

    from xllm_service.cli.answer import show
    from xllm_service.cli.failures import UsageError
    from xllm_service.cli.served import ServedGeneration

    if system is not None and not chat:
        raise UsageError("--system has no effect without --chat; add --chat, or leave it out")
    text = options.read_text(prompt)
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
        started = time.monotonic()
        if chat:
            generation = client.chat(options.messages(text, system), **sampling)
        else:
            generation = client.generate(text, **sampling)
        show(ServedGeneration(generation), started, as_json=as_json)
