"""Generations that this process computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from xllm_service.cli.answer import Figures

if TYPE_CHECKING:
    from xllm_service.engine import AcceptedEvent, FinishedEvent, LocalEngine


class ComputedGeneration:
    """A generation of an engine of this process, as the verbs show it.

    Args:
        engine: what computes it.
        prompt: token ids.
        sampling: the options that the user gave.
    """

    def __init__(self, engine: LocalEngine, prompt: Sequence[int], sampling: Mapping[str, Any]) -> None:
        options = dict(sampling)
        options["stop_strings"] = options.pop("stop", ())
        self._model = engine.model.info.name
        self._events = engine.stream(prompt, **options)
        self._texts: list[str] = []
        self._accepted: AcceptedEvent | None = None
        self._finished: FinishedEvent | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._events.close()  # type: ignore[attr-defined]  # it is a generator

    def __iter__(self) -> Iterator[str]:
        from xllm_service.engine import AcceptedEvent, FinishedEvent, TokenEvent

        for event in self._events:
            if isinstance(event, AcceptedEvent):
                self._accepted = event
            elif isinstance(event, TokenEvent):
                self._texts.append(event.text)
                yield event.text
            elif isinstance(event, FinishedEvent):
                self._finished = event
                if event.text:
                    self._texts.append(event.text)
                    yield event.text

    def figures(self) -> Figures:
        """Return the whole of it; after the last item."""
        accepted, finished = self._accepted, self._finished
        assert accepted is not None and finished is not None  # a stream without them raises
        return Figures(
            text="".join(self._texts),
            reasoning_text="",
            finish_reason=finished.finish_reason.name,
            model=self._model,
            request_id=str(finished.request_id),
            seed=accepted.seed,
            num_prompt_tokens=finished.num_prompt_tokens,
            num_cached_tokens=finished.num_cached_tokens,
            num_generated_tokens=finished.num_generated_tokens,
            queue_s=finished.queue_s,
            prefill_s=finished.prefill_s,
            decode_s=finished.decode_s,
        )
