"""`xllm run MODEL [PROMPT]`: an answer or a conversation, computed in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xllm_service.cli import options, settings

if TYPE_CHECKING:
    from xllm_service.cli.conversation import Messages
    from xllm_service.engine import LocalEngine


def register(app: typer.Typer) -> None:
    """Add the verb."""
    settings.register(app, run, settings.ENGINE_SETTINGS)


def run(
    model: options.ModelArgument,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="The text to continue; - reads it from stdin. Without it: a conversation.",
            show_default=False,
        ),
    ] = None,
    *,
    chat: Annotated[bool, typer.Option("--chat", help="PROMPT is a message: apply the model's chat template.")] = False,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="In a conversation: the system message.", show_default=False)
    ] = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    as_json: options.JsonFlag = False,
    settings: Mapping[str, Any],
) -> None:
    """Continue a text, or talk with a model, in this process and without a server."""
    import time

    from xllm_service.cli.answer import show
    from xllm_service.cli.computed import ComputedGeneration
    from xllm_service.cli.conversation import converse
    from xllm_service.cli.failures import UsageError
    from xllm_service.cli.terminal import progress
    from xllm_service.config import load_config
    from xllm_service.models import resolve_model

    if system is not None and prompt is not None and not chat:
        raise UsageError("--system has no effect without --chat; add --chat, or leave it out")
    text = options.read_text(prompt) if prompt is not None else None
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
    load_config(model, settings)  # what is wrong shows before a long download
    with progress() as report:
        config = load_config(resolve_model(model, report), {**settings, "max_slots": 1})

    from xllm_service.engine import exit_on_lost_file, open_engine, open_model

    exit_on_lost_file()
    with open_model(config.model, pretokenizer=config.pretokenizer) as opened, open_engine(opened, config) as engine:

        def answer(messages: Messages) -> ComputedGeneration:
            return ComputedGeneration(engine, _chat_prompt(engine, messages), sampling)

        started = time.monotonic()
        if text is None:
            converse(answer, system=system, as_json=as_json)
        elif chat:
            show(answer(options.messages(text, system)), started, as_json=as_json)
        else:
            show(ComputedGeneration(engine, opened.encode(text), sampling), started, as_json=as_json)


def _chat_prompt(engine: LocalEngine, messages: Messages) -> list[int]:
    return engine.model.encode_pieces(engine.model.render(messages))
