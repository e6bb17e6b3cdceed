"""Options that several verbs share: how to reach a server, and how a generation goes.

What is left out stays unset in the request, so the server's own defaults hold; values are judged there too.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from xllm_client import Client

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A .gguf file, or a name that `xllm pull` knows.", show_default=False)
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

Endpoint = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="The server: unix:PATH, HOST:PORT or [IPV6]:PORT. Default: the socket on which your `xllm serve` listens.",
        show_default=False,
    ),
]
TokenFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Send the bearer token in this file.", show_default=False)
]
TlsCa = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Connect with TLS and trust this CA (PEM).", show_default=False),
]
Tls = Annotated[bool, typer.Option("--tls", help="Connect with TLS and trust the system's CAs.")]
TlsCert = Annotated[Path | None, typer.Option(metavar="FILE", help="Your certificate (mTLS).", show_default=False)]
TlsKey = Annotated[Path | None, typer.Option(metavar="FILE", help="The key of --tls-cert.", show_default=False)]

# note: whole numbers are bounded here by what the contract's fields hold; the server judges the rest.
MaxTokens = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, max=2**31 - 1, help="Most tokens to generate.", show_default=False),
]
Temperature = Annotated[
    float | None, typer.Option(metavar="T", help="Divides the logits; 0, the default, is greedy.", show_default=False)
]
TopK = Annotated[
    int | None, typer.Option(metavar="N", min=0, max=2**63 - 1, help="Keep the N best tokens.", show_default=False)
]
TopP = Annotated[
    float | None,
    typer.Option(metavar="P", help="Keep the best tokens whose probabilities sum to P.", show_default=False),
]
MinP = Annotated[
    float | None,
    typer.Option(metavar="P", help="Keep tokens at least P times as probable as the best.", show_default=False),
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(metavar="X", help="Make seen tokens less likely; 1: off.", show_default=False)
]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        max=2**64 - 1,
        help="The same seed gives the same text. Default: drawn.",
        show_default=False,
    ),
]
Stop = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="End at this text; may be repeated.", show_default=False)
]


def given(**options: Any) -> dict[str, Any]:
    """Return the options that the user gave."""
    return {name: value for name, value in options.items() if value is not None}


def connect(
    endpoint: str | None,
    *,
    token_file: Path | None = None,
    tls: bool = False,
    tls_ca: Path | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
) -> Client:
    """Return a client for what the options say. Raises UsageError for an address or files that cannot be used."""
    import xllm_client
    from xllm_service.cli.failures import UsageError

    settings: xllm_client.Tls | None = None
    try:
        token = token_file.read_text(encoding="ascii").strip() if token_file is not None else None
        if tls or tls_ca or tls_cert or tls_key:
            settings = xllm_client.Tls.from_files(root=tls_ca, key=tls_key, cert=tls_cert)
        return xllm_client.Client(endpoint, token=token, tls=settings)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error


def read_text(text: str) -> str:
    """Return the text itself, or all of stdin where it is `-`. Raises UsageError for bytes that are no UTF-8."""
    from xllm_service.cli.failures import UsageError

    if text != "-":
        try:
            text.encode()
        except UnicodeEncodeError as error:  # bytes of the command line that are no UTF-8 arrive as lone surrogates
            raise UsageError("the text is not valid UTF-8; convert it first, for example with iconv") from error
        return text
    import sys

    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"stdin is not valid UTF-8 ({error.reason} at byte {error.start}); convert it first"
        ) from error


def messages(text: str, system: str | None = None) -> list[dict[str, str]]:
    """Return a conversation that begins with one message of the user's."""
    first = [{"role": "system", "content": system}] if system is not None else []
    return [*first, {"role": "user", "content": text}]
