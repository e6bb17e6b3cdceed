"""Rows as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COLUMNS = (
    ("mode", "decode_mode"),
    ("path", "path"),
    ("KV", "kv_type"),
    ("cap", "cap"),
    ("prompt", "prompt_tokens"),
    ("bs", "bs"),
    ("TTFT ms", "ttft_ms"),
    ("step ms", "step_ms"),
    ("p90", "step_ms_p90"),
    ("TPOT ms", "tpot_ms"),
    ("decode tok/s", "decode_tok_s"),
    ("prefill tok/s", "prefill_tok_s"),
    ("floor ms", "floor_ms"),
)


def print_table(machine: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print what was measured on stdout; a row that failed says why."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    bandwidth = machine.get("read_bandwidth")
    read = f", reads {bandwidth / 1e9:.1f} GB/s" if bandwidth else ""
    models = ", ".join(dict.fromkeys(str(row["model"]) for row in rows))
    table = Table(title=f"{models} on {machine.get('device') or machine['cpu']}{read}", title_justify="left", box=None)
    for header, _ in COLUMNS:
        table.add_column(header, justify="left" if header in ("mode", "path", "KV") else "right")
    table.add_column("of floor", justify="right")
    errors = []
    for row in rows:
        if "error" in row:
            errors.append(row)
            continue
        table.add_row(*(Text(cell_text(row.get(key))) for _, key in COLUMNS), Text(share_of_floor(row)))
    # A pipe has no width: the table then gets what it needs.
    console = Console(width=None if Console().is_terminal else 200)
    console.print(table)
    for row in errors:
        console.print(Text(describe_row(row)))


def cell_text(value: object) -> str:
    """Return a cell's text: three significant digits of a number that was measured, "" for one that was not."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:#.3g}" if 0 < value < 100 else f"{value:.0f}"
    return str(value)


def share_of_floor(row: Mapping[str, Any]) -> str:
    """Return floor / step time in percent, "" where no floor is known."""
    return f"{row['floor_ms'] / row['step_ms']:.0%}" if row["floor_ms"] else ""


def describe_row(row: Mapping[str, Any]) -> str:
    """Return one line: which cell, and its step time or why it has none."""
    cell = f"KV {row['kv_type']}, cap {row['cap']}, prompt {row['prompt_tokens']}, bs {row['bs']}"
    return f"{cell}: {row['error'] if 'error' in row else cell_text(row['step_ms']) + ' ms a step'}"
