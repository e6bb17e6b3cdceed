"""From a prompt, in whatever form it came, to token ids; and whether the model is the one that is meant."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from xllm_service.chat_template import Piece
from xllm_service.constraints import Constrained
from xllm_service.engine import CacheUse, Model
from xllm_service.errors import InvalidFieldError, Reason, ServiceError
from xllm_service.interceptors import principal
from xllm_service.validation import DecodeChoices, PromptInput

_LONG_TEXT = 4096  # characters; longer text is read in a worker thread
_VERY_LONG_TEXT = 1 << 18  # characters; these are read one by one: see Model.very_long_texts

_T = TypeVar("_T")


async def aside(model: Model, size: int, work: Callable[[], _T]) -> _T:
    """Do work whose time and memory follow the size of a text, so that nothing else waits for it."""
    if size <= _LONG_TEXT:
        return work()
    if size <= _VERY_LONG_TEXT:
        return await model.in_worker(work)
    async with model.very_long_texts:
        return await model.in_worker(work)


async def check_digest(model: Model, expected: str) -> None:
    """Raise MODEL_DIGEST_MISMATCH for another model; waits where its digest is not known yet."""
    if not expected:
        return
    actual = model.digest.value or await asyncio.to_thread(model.digest.wait)
    if actual != expected:
        raise ServiceError(
            Reason.MODEL_DIGEST_MISMATCH,
            f"the model served is {actual}, not {expected}",
            metadata={"expected": expected, "actual": actual},
        )


def cache_use(prompt: PromptInput) -> CacheUse:
    """Return how a prompt of this call's caller uses the prefix cache."""
    return CacheUse.of(principal.get(), prompt.cache_salt, prompt.bypass_cache)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that has been read.

    Attributes:
        ids: its tokens; at least one.
        starts_in_reasoning: it is a conversation, and ends inside a reasoning section.
    """

    ids: Sequence[int]
    starts_in_reasoning: bool = False


async def read_prompt(model: Model, prompt: PromptInput, path: str, *, add_special: bool = True) -> Prompt:
    """Return the token ids of a prompt and what they lead to; long work goes to a worker thread.

    Args:
        model: whose tokenizer and chat template read it.
        prompt: what was checked.
        path: of the message that holds the prompt, for errors: "spec.", or nothing.
        add_special: for a text that does not say.

    Raises:
        ServiceError: NO_TOKENIZER, NO_CHAT_TEMPLATE, TEMPLATE_REFUSED, RENDERER_UNAVAILABLE; INVALID_FIELD where
            there is no token at all.
    """
    if prompt.token_ids is not None:
        return Prompt(prompt.token_ids)
    chat = prompt.chat
    if chat is not None:

        def render() -> list[Piece]:
            return model.render(
                chat.messages,
                tools=chat.tools,
                add_generation_prompt=chat.add_generation_prompt,
                arguments=chat.arguments,
            )

        def read_chat() -> Prompt:
            model.check_tokenizer()
            written = [piece.text for piece in pieces if piece.trusted]
            return Prompt(model.encode_pieces(pieces), model.markers.starts_in_reasoning(written))

        try:
            pieces = await model.in_worker(render)
            read = await aside(model, sum(len(piece.text) for piece in pieces), read_chat)
        except ServiceError as error:
            if error.reason is Reason.TEMPLATE_REFUSED:
                error.field = f"{path}{error.field}"
            raise
    else:
        text = prompt.text or ""
        add = add_special if prompt.add_special_tokens is None else prompt.add_special_tokens

        def read_text() -> Prompt:
            model.check_tokenizer()
            return Prompt(model.encode(text, add_special=add, parse_special=prompt.parse_special))

        read = await aside(model, len(text), read_text)
    if not read.ids:
        name = "chat" if chat is not None else "text"
        raise InvalidFieldError([(f"{path}{name}", "gives no token at all; a prompt needs at least one")])
    return read


async def compiled(model: Model, choices: DecodeChoices, path: str, *, free_until: str = "") -> DecodeChoices:
    """Return the choices with their constraint compiled, in a worker thread; as they are where there is none.

    Args:
        model: whose tokens it will be about.
        choices: what was checked.
        path: of the message that holds the constraint, for errors: "spec.", or nothing.
        free_until: text that ends what comes in front of the constrained part; empty: nothing does.

    Raises:
        ServiceError: INVALID_CONSTRAINT, NO_TOKENIZER, QUEUE_FULL, COMPILER_UNAVAILABLE.
    """
    constraint = choices.constraint
    if constraint is None:
        return choices
    field = f"{path}constraint.{constraint.kind}"
    matcher = await model.compile(constraint, field, principal.get())
    return replace(choices, constrained=Constrained(matcher, free_until, field))
