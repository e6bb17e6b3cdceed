"""`xllm bench MODEL`: TTFT and step time over batch sizes, prompt lengths, caps and KV types, in this process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from xllm_service.cli import options, settings

_SETTINGS = settings.ENGINE_SETTINGS - {"kv_type", "max_seq_len"}  # of these two it takes lists


def register(app: typer.Typer) -> None:
    """Add the verb."""
    settings.register(app, bench, _SETTINGS)


def bench(
    model: options.ModelArgument,
    *,
    prompt_tokens: Annotated[str, typer.Option(metavar="N,..", help="Prompt lengths.")] = "128",
    gen_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens generated per request.", min=2)] = 128,
    batch: Annotated[str, typer.Option(metavar="N,..", help="Batch sizes: requests decoding at once.")] = "1",
    cap: Annotated[str, typer.Option(metavar="N,..", help="max_seq_len; 0 is the model's context length.")] = "0",
    kv_type: Annotated[str, typer.Option(metavar="T,..", help="KV types, of f16, int8 and int4.")] = "f16",
    repeat: Annotated[int, typer.Option(metavar="N", help="Runs of each cell.", min=1)] = 1,
    read_bandwidth: Annotated[
        float | None,
        typer.Option(
            metavar="GB/S",
            help="The device's read bandwidth, for the floor. Default: measured on a CPU, known for some GPUs.",
            show_default=False,
            min=0.001,
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write all of it as JSON; - is stdout.", show_default=False),
    ] = None,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw a figure (needs matplotlib).", show_default=False),
    ] = None,
    settings: Mapping[str, Any],
) -> None:
    """Measure TTFT and step time, in this process and without a server.

    A cell that cannot be measured is a row that says why; the exit code is 1 when all of them are.
    """
    from xllm_service.cli.benchmark.machine import describe_machine
    from xllm_service.cli.benchmark.plot import require_matplotlib, save_plot
    from xllm_service.cli.benchmark.rows import Row, Sweep, run_sweep
    from xllm_service.cli.benchmark.table import describe_row, print_table
    from xllm_service.cli.terminal import progress, say
    from xllm_service.config import load_config
    from xllm_service.models import resolve_model

    sweep = Sweep(
        prompt_tokens=_numbers("--prompt-tokens", prompt_tokens, 1),
        gen_tokens=gen_tokens,
        batches=_numbers("--batch", batch, 1),
        caps=_numbers("--cap", cap, 0),
        kv_types=kv_type.split(","),
        repeat=repeat,
        bandwidth=read_bandwidth * 1e9 if read_bandwidth is not None else None,
    )
    for name in sweep.kv_types:
        load_config(model, {**settings, "kv_type": name, "max_slots": max(sweep.batches)})
    if plot_file is not None:
        require_matplotlib()
    with progress() as report:
        path = resolve_model(model, report)
    machine = describe_machine()
    rows: list[Row] = []

    def on_row(row: Row) -> None:
        rows.append(row)
        say(f"xllm: {describe_row(row)}")

    try:
        run_sweep(path, settings, sweep, machine, on_row)
    finally:
        if json_file is not None and rows:  # also what an interrupted sweep has got
            _write_json(json_file, {"machine": machine, "rows": rows})
    if json_file != Path("-"):
        print_table(machine, rows)
    if plot_file is not None:
        save_plot(rows, plot_file)
    if all("error" in row for row in rows):
        raise typer.Exit(1)


def _numbers(flag: str, text: str, least: int) -> list[int]:
    from xllm_service.cli.failures import UsageError

    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise UsageError(f"{flag}: expected whole numbers from {least} on with commas between them, found {text!r}")
    return numbers


def _write_json(target: Path, found: dict[str, Any]) -> None:
    import json

    text = json.dumps(found, ensure_ascii=False, indent=1)
    if target == Path("-"):
        typer.echo(text)
    else:
        target.write_text(f"{text}\n", encoding="utf-8")
