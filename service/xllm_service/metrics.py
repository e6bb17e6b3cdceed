"""Prometheus metrics of one server. Names carry units; times are seconds on a monotonic clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from xllm_client.endpoint import Endpoint
from xllm_service.histogram import Histogram

_LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Snapshot(Protocol):
    """What is read of an engine's statistics."""

    num_running: int
    num_waiting: int
    slots_total: int
    slots_used: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    last_step_s: float
    heartbeat_age_s: float
    cancel_steps_max: int
    token_gap_bound_s: float
    token_gap_max_s: float


class Metrics:
    """Counts calls and times generations; an engine's own counters are read when somebody asks."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.calls = Counter("xllm_calls", "Calls that ended.", ["method", "code"], registry=self.registry)
        self.time_to_first_token = self._histogram(
            "xllm_time_to_first_token_seconds", "From a call's arrival to its first token."
        )
        self.inter_token_latency = self._histogram(
            "xllm_inter_token_latency_seconds", "Gap between two deltas of one stream, as the event loop saw them."
        )
        self.time_per_output_token = self._histogram(
            "xllm_time_per_output_token_seconds", "Mean time between two tokens of one generation, once it has ended."
        )
        self.queue_time = self._histogram("xllm_queue_seconds", "From a call's arrival to its place in the batch.")
        self.cancel_to_free = self._histogram(
            "xllm_cancel_to_free_seconds",
            "From the end of a call that was cut short to its slot and blocks being free.",
        )
        self.batch_size = Histogram(
            "xllm_batch_size_requests",
            "Requests that got tokens, one sample for each wake-up of the event loop: each step, while it keeps up.",
            (1, 2, 4, 8, 16, 32, 64, 128, 256),
            self.registry,
        )
        self.failures = Counter(
            "xllm_failures",
            "Calls that ended with a reason of ours, by ErrorInfo.reason.",
            ["reason"],
            registry=self.registry,
        )
        self.coalesced = Histogram(
            "xllm_delta_tokens",
            "Tokens that one message of a stream carries.",
            (1, 2, 4, 8, 16, 32, 64, 256),
            self.registry,
        )

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, _LATENCIES, self.registry)

    def watch_engines(self, snapshots: Callable[[], Mapping[str, Any]]) -> None:
        """Report the statistics of every engine there is when somebody asks, under its model's name."""
        self.registry.register(_EngineCollector(snapshots))

    def serve(self, address: Endpoint) -> tuple[int, Callable[[], None]]:
        """Answer scrapes over plain HTTP from a thread; return the port and what stops it. Raises OSError."""
        server, thread = start_http_server(address.port, address.host, self.registry)

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return server.server_port, stop


class _EngineCollector:
    def __init__(self, snapshots: Callable[[], Mapping[str, Any]]) -> None:
        self._snapshots = snapshots

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        """One family for each figure, with a sample for each engine."""
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for model, stats in self._snapshots().items():
            for kind, figures in ((GaugeMetricFamily, _gauges(stats)), (CounterMetricFamily, _counters(stats))):
                for name, text, value in figures:
                    family = families.get(name)
                    if family is None:
                        family = families[name] = kind(name, text, labels=["model"])
                    family.add_metric([model], value)
        return families.values()


def _gauges(stats: Snapshot) -> list[tuple[str, str, float]]:
    usage = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
    return [
        ("xllm_requests_running", "Requests in the batch.", stats.num_running),
        ("xllm_requests_waiting", "Requests that wait for a slot.", stats.num_waiting),
        ("xllm_token_gap_bound_seconds", "Longest time meant between two tokens.", stats.token_gap_bound_s),
        ("xllm_token_gap_max_seconds", "Longest time there was between two tokens.", stats.token_gap_max_s),
        ("xllm_slots", "Slots in all.", stats.slots_total),
        ("xllm_slots_used", "Slots taken.", stats.slots_used),
        ("xllm_kv_cache_usage_ratio", "Share of the KV blocks that live requests hold, 0 to 1.", usage),
        ("xllm_kv_blocks_cached", "KV blocks that the prefix cache alone holds.", stats.blocks_cached),
        ("xllm_step_seconds", "Duration of the last step.", stats.last_step_s),
        ("xllm_heartbeat_age_seconds", "Since the step loop last showed that it lives.", stats.heartbeat_age_s),
        ("xllm_cancel_steps_max", "Most steps between a cancel and its blocks being free.", stats.cancel_steps_max),
    ]


def _counters(stats: Snapshot) -> list[tuple[str, str, float]]:
    return [
        ("xllm_steps", "Steps.", stats.num_steps),
        ("xllm_prompt_tokens", "Prompt tokens taken in.", stats.num_prompt_tokens),
        ("xllm_cached_prompt_tokens", "Prompt tokens found in the prefix cache.", stats.num_cached_tokens),
        ("xllm_generation_tokens", "Tokens generated.", stats.num_generated_tokens),
        ("xllm_preemptions", "Requests that gave their blocks back and were resumed.", stats.num_preemptions),
    ]
