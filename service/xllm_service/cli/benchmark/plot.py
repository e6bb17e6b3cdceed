"""Rows as a figure, through matplotlib, which only this needs."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xllm_service.cli.failures import Failure


def require_matplotlib() -> None:
    """Raise Failure, which says how to get it, where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise Failure(
            "--plot needs matplotlib, which is not installed; run `pip install 'xllm[plot]'`, or leave it out"
        )


def save_plot(rows: Sequence[Mapping[str, Any]], target: Path) -> None:
    """Draw step time over batch size with its floor, and TTFT over prompt length; the ending decides the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (steps, ttft) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for label, x, y, floor in _curves(rows, "bs", "step_ms", "prompt_tokens"):
        (line,) = steps.plot(x, y, marker="o", label=label)
        if all(value is not None for value in floor):
            steps.plot(x, floor, linestyle=":", color=line.get_color())
    steps.set(xlabel="bs, slots decoding at once", ylabel="step time, ms (dotted: floor)", xscale="log", ylim=(0, None))
    for label, x, y, _ in _curves(rows, "prompt_tokens", "ttft_ms", "bs"):
        ttft.plot(x, y, marker="o", label=label)
    ttft.set(xlabel="prompt, tokens", ylabel="TTFT, ms", ylim=(0, None))
    for axes in (steps, ttft):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle(", ".join(dict.fromkeys(f"{row['model']} on {row['device']}" for row in rows)))
    figure.savefig(target)
    pyplot.close(figure)


def _curves(
    rows: Sequence[Mapping[str, Any]], x: str, y: str, other: str
) -> list[tuple[str, list[int], list[float], list[float | None]]]:
    """Return a curve of y over x for each combination of the rest."""
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if "error" not in row:
            groups[f"{row['decode_mode']}, KV {row['kv_type']}, cap {row['cap']}, {other} {row[other]}"].append(row)
    return [
        (label, [row[x] for row in group], [row[y] for row in group], [row["floor_ms"] for row in group])
        for label, group in groups.items()
    ]
