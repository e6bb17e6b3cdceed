"""`xllm inspect MODEL`: what a file holds, what was inferred from it, and what an engine would need."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from xllm_service.cli import options, settings

if TYPE_CHECKING:
    from xllm_service.config import ServeConfig
    from xllm_service.engine import Model


def register(app: typer.Typer) -> None:
    """Add the verb."""
    settings.register(app, inspect, settings.ENGINE_SETTINGS | {"max_slots"})


def inspect(model: options.ModelArgument, *, as_json: options.JsonFlag = False, settings: Mapping[str, Any]) -> None:
    """Show a model's metadata, tensor types, tokenizer, and the Plan: what it needs in memory with these settings."""
    import json

    from xllm_service.cli.terminal import progress
    from xllm_service.config import load_config
    from xllm_service.models import resolve_model

    load_config(model, settings)
    with progress() as report:
        config = load_config(resolve_model(model, report), settings)

    from xllm_service.engine import open_model

    with open_model(config.model, pretokenizer=config.pretokenizer) as opened:
        found = describe(opened, config)
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False, indent=2))
    else:
        _print(found)


def _template_problem(model: Model) -> str:
    from xllm_service.sandbox import SandboxUnavailableError

    try:
        return model.chat_template.problem
    except SandboxUnavailableError as error:
        return f"not known: {error}"


def describe(model: Model, config: ServeConfig) -> dict[str, Any]:
    """Return all of it as JSON values."""
    import json

    from xllm_service.errors import ServiceError

    plan: dict[str, Any] | None = None
    problem = ""
    try:
        plan = asdict(model.plan(config))
    except ServiceError as error:  # a file that holds only a vocabulary, or settings that this model refuses
        problem = str(error)
    info = asdict(model.info)
    template = info.pop("chat_template")
    return {
        "model": info,
        "chat_template": {"source": template, "problem": _template_problem(model)},
        "metadata": [
            {"key": entry.key, "type": entry.type, "value": json.loads(entry.value_json)} for entry in model.metadata()
        ],
        "tensor_types": tensor_types(model.tensors()),
        "facts": [asdict(fact) for fact in model.facts()],
        "end_tokens": [asdict(token) for token in model.end_tokens()],
        "plan": plan,
        "plan_problem": problem,
    }


def tensor_types(tensors: Sequence[Any]) -> list[dict[str, Any]]:
    """Return for each tensor type how many tensors have it and how many bytes they take, the largest share first."""
    counts: dict[str, int] = defaultdict(int)
    sizes: dict[str, int] = defaultdict(int)
    for tensor in tensors:
        counts[tensor.dtype] += 1
        sizes[tensor.dtype] += tensor.size_bytes
    return [
        {"type": dtype, "num_tensors": counts[dtype], "size_bytes": sizes[dtype]}
        for dtype in sorted(sizes, key=lambda name: (-sizes[name], name))
    ]


def _print(found: Mapping[str, Any]) -> None:
    """Print tables for people; long values are cut, --json has all of them."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from xllm_service.cli.terminal import for_terminal

    console = Console()

    def table(title: str, rows: Sequence[Sequence[object]], *header: str) -> None:
        drawn = Table(title=title, title_justify="left", show_header=bool(header), box=None, pad_edge=False)
        for name in header or [""] * (len(rows[0]) if rows else 0):
            drawn.add_column(name, overflow="fold")
        for row in rows:
            # Text, not str: what comes from a file must not be taken for markup or drive the terminal.
            drawn.add_row(*(Text(for_terminal(_cut(str(value)))) for value in row))
        console.print(drawn)
        console.print()

    table("Model", [(name, _number(value)) for name, value in found["model"].items()])
    template = found["chat_template"]
    state = template["problem"] or f"{len(template['source'])} characters, compiles"
    table("Inferred", [(f["name"], f["value"], f["source"]) for f in found["facts"]], "fact", "value", "source")
    table(
        "Ends a generation",
        [(t["token_id"], t["text"], t["source"]) for t in found["end_tokens"]],
        "id",
        "token",
        "source",
    )
    table("Chat template", [("template", state)])
    table(
        "Tensor types",
        [(t["type"], t["num_tensors"], _number(t["size_bytes"])) for t in found["tensor_types"]],
        "type",
        "tensors",
        "bytes",
    )
    table("Metadata", [(m["key"], m["type"], m["value"]) for m in found["metadata"]], "key", "type", "value")
    if found["plan"] is None:
        table("Plan", [("none", found["plan_problem"])])
    else:
        table("Plan (bytes)", [(name, _number(value)) for name, value in found["plan"].items()])


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _cut(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."
