"""Tables for the documents, made from the JSON files of `xllm bench`: python -m bench.report FILE...

One Markdown table for each machine and model, a line for each row that was measured; below it, the rows that failed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from xllm_service.cli.benchmark.table import COLUMNS, cell_text, describe_row, share_of_floor

Row = Mapping[str, Any]

_TEXT = ("decode_mode", "path", "kv_type")


def report(found: Mapping[str, Any]) -> str:
    """Return one file's tables."""
    parts = []
    for model in dict.fromkeys(row["model"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["model"] == model]
        parts.append("\n".join([f"### {model}", "", _machine(found["machine"]), "", *_table(rows)]))
    return "\n\n".join(parts)


def _machine(machine: Row) -> str:
    facts = [machine.get("device") or machine["cpu"]]
    if threads := machine.get("threads"):
        facts.append(f"{threads} threads")
    if bandwidth := machine.get("read_bandwidth"):
        facts.append(f"reads {bandwidth / 1e9:.3g} GB/s ({machine['read_bandwidth_source']})")
    if driver := machine.get("driver"):
        facts.append(f"driver {driver}")
    facts += [f"xLLM {machine['xllm_version']}", f"commit {machine.get('commit') or 'unknown'}", machine["date"][:10]]
    return ", ".join(facts)


def _table(rows: Sequence[Row]) -> Iterable[str]:
    yield "| " + " | ".join(header for header, _ in COLUMNS) + " | of floor |"
    yield "|" + "".join("---|" if key in _TEXT else "---:|" for _, key in COLUMNS) + "---:|"
    for row in rows:
        if "error" not in row:
            yield "| " + " | ".join(cell_text(row.get(key)) for _, key in COLUMNS) + f" | {share_of_floor(row)} |"
    for row in rows:
        if "error" in row:
            yield ""
            yield f"Not measured: {describe_row(row)}"


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m bench.report FILE...   (what `xllm bench --json FILE` wrote)")
    print("\n\n".join(report(json.loads(Path(name).read_text(encoding="utf-8"))) for name in sys.argv[1:]))
