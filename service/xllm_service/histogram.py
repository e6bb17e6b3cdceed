"""A Prometheus histogram for what happens with every token."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric


class Histogram:
    """Counts values by size. One thread observes; any may read.

    prometheus_client's own takes a lock for each of its numbers, which costs more than a token's way to its client may.

    Args:
        name: of the metric, with its unit.
        text: what it counts.
        bounds: inclusive upper ends of the buckets, ascending; one without an end is added.
        registry: where it is read.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(bounds)
        self._names = [*(str(float(bound)) for bound in bounds), "+Inf"]
        self._counts = [0] * len(self._names)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def describe(self) -> list[Metric]:
        """Nothing beyond what is collected."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Return the buckets, each with all that are below it."""
        totals = list(itertools.accumulate(self._counts))
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric([], list(zip(self._names, totals, strict=True)), self._sum)
        return [family]
