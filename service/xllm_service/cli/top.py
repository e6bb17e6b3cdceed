"""`xllm top`: what a server is doing, refreshed until Ctrl-C."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xllm_service.cli import options

if TYPE_CHECKING:
    from rich.table import Table

    from xllm_client.v1.admin_service_pb2 import EngineLoad


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command()(top)


def top(
    endpoint: options.Endpoint = None,
    interval: Annotated[float, typer.Option(metavar="SECONDS", help="Between two looks.", min=0.1)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once: rates then need two looks and are absent.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per engine and look.")] = False,
    token_file: options.TokenFile = None,
    tls: options.Tls = False,
    tls_ca: options.TlsCa = None,
    tls_cert: options.TlsCert = None,
    tls_key: options.TlsKey = None,
) -> None:
    """Show a server's slots, KV use and rates."""
    import json
    import time

    client = options.connect(
        endpoint, token_file=token_file, tls=tls, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key
    )
    before: dict[str, EngineLoad] = {}

    def look() -> list[dict[str, Any]]:
        loads = client.load()
        found = [describe(load, before.get(load.model)) for load in loads]
        before.update({load.model: load for load in loads})
        return found

    with client:
        if as_json or once:
            from rich.console import Console

            while True:
                found = look()
                if as_json:
                    for engine in found:
                        print(json.dumps(engine, ensure_ascii=False), flush=True)
                else:
                    # A pipe has no width: the table then gets what it needs.
                    Console(width=None if Console().is_terminal else 200).print(draw(client.endpoint, found))
                if once:
                    return
                time.sleep(interval)
        from rich.live import Live

        with Live(draw(client.endpoint, look()), auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                live.update(draw(client.endpoint, look()), refresh=True)


def describe(now: EngineLoad, before: EngineLoad | None) -> dict[str, Any]:
    """Return one engine's load as JSON values; rates are over the time since `before`."""
    found: dict[str, Any] = {
        "model": now.model,
        "slots_used": now.num_slots - now.num_free_slots,
        "slots_total": now.num_slots,
        "requests_running": now.num_running_requests,
        "requests_waiting": now.num_waiting_requests,
        "kv_blocks_used": now.num_used_kv_blocks,
        "kv_blocks_cached": now.num_cached_kv_blocks,
        "kv_blocks_total": now.num_kv_blocks,
        "step_ms": _seconds(now.step_time) * 1e3 if now.HasField("step_time") else None,
        "preemptions": now.num_preemptions,
        "decode_tok_s": None,
        "prefill_tok_s": None,
        "steps_per_s": None,
    }
    elapsed_s = _seconds(now.snapshot_time) - _seconds(before.snapshot_time) if before is not None else 0.0
    # Counters that went back: another server has taken the address.
    if before is not None and elapsed_s > 0 and now.num_steps >= before.num_steps:
        found["decode_tok_s"] = (now.num_generated_tokens - before.num_generated_tokens) / elapsed_s
        found["prefill_tok_s"] = (now.num_prompt_tokens - before.num_prompt_tokens) / elapsed_s
        found["steps_per_s"] = (now.num_steps - before.num_steps) / elapsed_s
    return found


def draw(endpoint: str, found: Iterable[Mapping[str, Any]]) -> Table:
    """Return the table for people."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"xLLM at {endpoint}", title_justify="left", box=None)
    table.add_column("model")
    for header in (
        "slots",
        "running",
        "waiting",
        "KV blocks",
        "of pool",
        "cached",
        "step ms",
        "decode tok/s",
        "prefill",
    ):
        table.add_column(header, justify="right")
    for engine in found:
        total = engine["kv_blocks_total"]
        table.add_row(
            Text(engine["model"]),
            f"{engine['slots_used']}/{engine['slots_total']}",
            str(engine["requests_running"]),
            str(engine["requests_waiting"]),
            f"{engine['kv_blocks_used']}/{total}",
            f"{engine['kv_blocks_used'] / total:.1%}" if total else "",
            str(engine["kv_blocks_cached"]),
            _number(engine["step_ms"]),
            _number(engine["decode_tok_s"]),
            _number(engine["prefill_tok_s"]),
        )
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _seconds(time: Any) -> float:
    """Return a Duration or a Timestamp in seconds."""
    return float(time.seconds + time.nanos / 1e9)
