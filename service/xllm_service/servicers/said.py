"""Prompts and outputs in the log, for whoever asks for them with --log-prompts."""

from __future__ import annotations

from collections.abc import Sequence

from xllm_service.admission import LiveGeneration
from xllm_service.engine import Model, Progress
from xllm_service.logs import facts, get_logger

_log = get_logger("said")


class Said:
    """Logs what one generation was given and what it said; does nothing where that is not asked for.

    Args:
        model: whose tokens they are.
        live: the generation.
        is_on: --log-prompts.
    """

    def __init__(self, model: Model, live: LiveGeneration, is_on: bool) -> None:
        self._model = model
        self._id = live.request_id
        self._is_on = is_on and model.info.has_tokenizer
        self._ids: dict[int, list[int]] = {}

    def prompt(self, ids: Sequence[int]) -> None:
        """Log a prompt as the model sees it, control tokens by their names."""
        if self._is_on:
            text = self._model.decode(ids, render_special=True)
            _log.info("prompt", extra=facts(request_id=self._id, text=text))

    def output(self, progress: Progress) -> None:
        """Take in what has come, and log an output that has ended."""
        if not self._is_on:
            return
        ids = self._ids.setdefault(progress.index, [])
        ids += [token.token_id for token in progress.tokens]
        if progress.finished is not None:
            text = self._model.decode(ids, render_special=True)
            _log.info("output", extra=facts(request_id=self._id, index=progress.index, text=text))
