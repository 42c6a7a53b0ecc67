"""Measurements that are taken for every message, for which prometheus_client takes too long.

Counts in plain numbers, belongs to one event loop, and is told to Prometheus when it is scraped.
"""

from bisect import bisect_left
from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString


class MessageTally:
    """Tokens that were sent, and the time between those of one answer."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """`bounds` are the upper ends of the histogram's buckets, in seconds and in order."""
        self.num_tokens = 0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count the time per token of one message."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterable[Metric]:
        """Give both metrics as they are now."""
        yield CounterMetricFamily(
            "swiftjax_generation_tokens", "Generated tokens", float(self.num_tokens)
        )
        buckets, total = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((floatToGoString(bound), float(total)))
        name = "swiftjax_inter_token_latency_seconds"
        yield HistogramMetricFamily(name, "inter token latency seconds", buckets, self._sum)
