"""Gives a verb the settings of config.py as flags, so that each has one name, one help text and one check.

config.py is read only when such a verb is used, or its help is shown.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

# What a verb that computes in this process lets the user choose of its engine.
ENGINE_SETTINGS = frozenset(
    (
        "allow_long_context",
        "backend",
        "block_size",
        "decode_mode",
        "device",
        "instruction_set",
        "kv_memory",
        "kv_type",
        "max_seq_len",
        "memory_limit",
        "prefill_chunk",
        "pretokenizer",
        "threads",
    )
)


def register(app: typer.Typer, verb: Callable[..., None], names: Collection[str] | None = None) -> None:
    """Add a verb whose parameter `settings` collects the flags by field name; `names` None: all settings there are."""

    class Command(TyperCommand):
        """Stands in for the verb in `xllm --help`, and becomes the whole of it when it is used."""

        def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
            return _whole_command(verb, names).make_context(info_name, args, parent, **extra)

    def placeholder() -> None:
        """Never called: the whole command is, in its place."""

    placeholder.__doc__ = verb.__doc__
    app.command(verb.__name__, cls=Command)(placeholder)


def _whole_command(verb: Callable[..., None], names: Collection[str] | None) -> Any:
    from xllm_service.config import SETTINGS

    own = inspect.signature(verb, eval_str=True).parameters
    chosen = {setting.field: setting for setting in SETTINGS if names is None or setting.field in names}

    def run(**arguments: Any) -> None:
        settings = {name: arguments.pop(name) for name in chosen}
        verb(**arguments, settings=settings)

    parameters = [parameter.replace(kind=_KEYWORD) for name, parameter in own.items() if name != "settings"]
    for setting in chosen.values():
        kind: Any = bool if setting.is_switch else list[str] | None if setting.is_multiple else str | None
        option = typer.Option(
            setting.flag,
            metavar=None if setting.is_switch else setting.metavar,
            help=setting.help,
            show_default=False,
            rich_help_panel="Settings",
        )
        default = False if setting.is_switch else None
        parameters.append(
            inspect.Parameter(setting.field, _KEYWORD, annotation=Annotated[kind, option], default=default)
        )
    run.__doc__ = verb.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command(verb.__name__)(run)
    return typer.main.get_command(app)


_KEYWORD = inspect.Parameter.KEYWORD_ONLY
