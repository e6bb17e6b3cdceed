"""Shows one generation: its text as it comes, then how fast it was.

The verbs that talk to a server and those that compute in process show the same events: both are iterators of
`xllm_client.Event`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from xllm_service.cli.terminal import milliseconds, say, stream_text

if TYPE_CHECKING:
    from google.protobuf.duration_pb2 import Duration

    from xllm_client import Event, Result


class Generation(Protocol):
    """A running generation; leaving the `with` statement cancels what still runs."""

    def __iter__(self) -> Iterator[Event]:
        """Yield its events as they come."""

    def __enter__(self) -> Self:
        """Return itself."""

    def __exit__(self, *exc: Any) -> None:
        """Cancel what still runs."""


@dataclass(frozen=True)
class Shown:
    """A generation that was shown to its end; `ttft_s` is from the call to the first text, None where none came."""

    result: Result
    ttft_s: float | None

    def summary(self) -> str:
        """One line of figures: TTFT, step time and counts (words as in the manual's page on measurements)."""
        usage = self.result.usage
        parts = []
        if self.ttft_s is not None:
            parts.append(f"TTFT {milliseconds(self.ttft_s)}")
        if (step_s := self.step_s) is not None:
            parts.append(f"step {milliseconds(step_s)} ({1 / step_s:.3g} tokens/s)")
        cached = f" ({usage.num_cached_tokens} cached)" if usage.num_cached_tokens else ""
        parts.append(f"{usage.num_prompt_tokens}{cached} + {usage.num_generated_tokens} tokens")
        return f"{', '.join(parts)}; ended by {self.result.finish_reason}"

    @property
    def step_s(self) -> float | None:
        """Mean seconds from one token to the next, on the engine's clock."""
        steps = self.result.usage.num_generated_tokens - 1
        decode_s = _seconds(self.result.timings.decode)
        return decode_s / steps if steps > 0 and decode_s > 0 else None

    def as_json(self) -> str:
        """One JSON object with the text, what it used and how long it took."""
        result = self.result
        timings = result.timings
        return json.dumps(
            {
                "text": result.text,
                "reasoning_text": result.reasoning_text,
                "finish_reason": result.finish_reason,
                "model": result.accepted.model,
                "request_id": result.accepted.request_id,
                "seed": result.accepted.effective.sampling.seed,
                "num_prompt_tokens": result.usage.num_prompt_tokens,
                "num_cached_tokens": result.usage.num_cached_tokens,
                "num_generated_tokens": result.usage.num_generated_tokens,
                "ttft_ms": None if self.ttft_s is None else round(self.ttft_s * 1e3, 3),
                "step_ms": None if self.step_s is None else round(self.step_s * 1e3, 3),
                "queue_ms": round(_seconds(timings.queue) * 1e3, 3),
                "prefill_ms": round(_seconds(timings.prefill) * 1e3, 3),
                "decode_ms": round(_seconds(timings.decode) * 1e3, 3),
            },
            ensure_ascii=False,
        )


def show(generation: Generation, started: float, *, prefix: str = "", as_json: bool = False) -> Shown:
    """Stream a generation to stdout and its figures to stderr; as JSON, one object at the end instead of the text.

    Args:
        generation: what to show; closed at the end, so that an interrupt gives its slot back.
        started: time.monotonic() at the call.
        prefix: text that goes before the answer.
        as_json: print one JSON object.
    """
    from xllm_client.events import ResultBuilder

    builder = ResultBuilder()
    ttft_s: float | None = None
    ends_line = True
    with generation:
        if prefix and not as_json:
            stream_text(prefix)
        for event in generation:
            builder.add(event.kind, event.message)
            if ttft_s is None and event.kind == "delta":
                ttft_s = time.monotonic() - started
            text = event.reasoning_text + event.text
            if text and not as_json:
                stream_text(text)
                ends_line = text.endswith("\n")
    shown = Shown(builder.result(), ttft_s)
    if as_json:
        print(shown.as_json(), flush=True)
        return shown
    if not ends_line:
        stream_text("\n")
    say(shown.summary())
    return shown


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
