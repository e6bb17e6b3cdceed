"""An engine in this process without an event loop, for the command line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from cyengine.types import EngineInfo, EngineStats, Event, FinishedEvent, Request, Status
from xllm_service.config import ServeConfig
from xllm_service.engine.core import create_core
from xllm_service.engine.failures import service_error, translated
from xllm_service.engine.model import Model


class LocalEngine:
    """An engine of this process, for code without an event loop. Close it, or use it in `with`."""

    def __init__(self, model: Model, core: Any) -> None:
        """Take over a started cyengine.Engine."""
        self.model = model
        self.core = core
        self.info: EngineInfo = core.info

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine; its model stays open."""
        self.core.close()

    def stats(self) -> EngineStats:
        """A snapshot."""
        stats: EngineStats = self.core.stats()
        return stats

    def submit(self, prompt: Sequence[int], *, max_tokens: int, ignore_eos: bool = False) -> int:
        """Queue a greedy request and return its id; its events come out of `take_events`. Raises ServiceError."""
        with translated():
            request_id: int = self.core.submit(Request(prompt=prompt, max_tokens=max_tokens, ignore_eos=ignore_eos))
            return request_id

    def take_events(self, timeout_s: float) -> list[Event]:
        """Take what has happened to submitted requests; waits so long while there is nothing. Raises ServiceError."""
        with translated():
            events: list[Event] = self.core.take_events(timeout_s=timeout_s)
            return events

    def cancel(self, request_id: int) -> None:
        """End a submitted request; its FinishedEvent says CANCELLED. Harmless for one that has ended."""
        with translated():
            self.core.cancel(request_id)

    def stream(self, prompt: Sequence[int], **options: Any) -> Iterator[Event]:
        """Generate from token ids and yield AcceptedEvent, TokenEvents and, last, FinishedEvent.

        Closing the iterator cancels the request. Options are the keywords of cyengine.Engine.generate: temperature,
        top_k, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty, seed, max_tokens, min_tokens,
        ignore_eos, num_logprobs, stop_strings, stop_token_ids, logit_bias, decode_mode, priority, max_queue_s,
        max_duration_s. Raises ServiceError, also when the generation fails later.
        """
        with translated():
            events = self.core.generate(list(prompt), **options)
            try:
                for event in events:
                    yield event
                    if isinstance(event, FinishedEvent) and event.status is not Status.OK:
                        raise service_error(event.status, event.message, event.details)
            finally:
                events.close()


def open_engine(model: Model, config: ServeConfig, *, log_fd: int | None = None) -> LocalEngine:
    """Load a model's weights into an engine of this process. Raises ServiceError.

    `log_fd` gets one line per notice; None: silent.
    """
    return LocalEngine(model, create_core(model, config, log_fd=log_fd))
