"""Generations that a server computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self

from xllm_service.cli.answer import Figures

if TYPE_CHECKING:
    from google.protobuf.duration_pb2 import Duration

    import xllm_client


class ServedGeneration:
    """A generation of xllm_client, as the verbs show it."""

    def __init__(self, generation: xllm_client.Generation) -> None:
        self._generation = generation

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._generation.close()

    def __iter__(self) -> Iterator[str]:
        for event in self._generation:
            if event.kind == "delta":
                yield event.reasoning_text + event.text

    def figures(self) -> Figures:
        """Return the whole of it; after the last item."""
        result = self._generation.result()
        return Figures(
            text=result.text,
            reasoning_text=result.reasoning_text,
            finish_reason=result.finish_reason,
            model=result.accepted.model,
            request_id=result.accepted.request_id,
            seed=result.accepted.effective.sampling.seed,
            num_prompt_tokens=result.usage.num_prompt_tokens,
            num_cached_tokens=result.usage.num_cached_tokens,
            num_generated_tokens=result.usage.num_generated_tokens,
            queue_s=_seconds(result.timings.queue),
            prefill_s=_seconds(result.timings.prefill),
            decode_s=_seconds(result.timings.decode),
        )


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
