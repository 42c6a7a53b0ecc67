"""What a server is like when it is scraped, as far as its engine has told."""

import time
from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from swiftjax import __version__
from swiftjax.engine.core import CoreStats
from swiftjax.memory import DeviceReport
from swiftjax.serving.engine_watch import EngineWatch
from swiftjax.serving.gate import Gate
from swiftjax.serving.served import Served


class Gauges:
    """The gauges of one server."""

    def __init__(self, served: Served, gate: Gate) -> None:
        self._served = served
        self._gate = gate

    def collect(self) -> Iterable[Metric]:
        """Ask everything once."""
        engine, watch = self._served.engine, self._served.watch
        stats = engine.stats()
        yield _gauge("engine_up", "Whether the engine takes requests", float(engine.is_alive))
        yield _gauge("draining", "Whether no new calls are taken", float(not self._gate.is_open))
        yield from _load(stats)
        yield from _cache(stats, self._served)
        if watch is not None:
            yield from _steps(watch, stats, is_pinged=self._served.pulse is not None)
        if (report := engine.devices()) is not None:
            yield from _devices(report)
        model = self._served.model
        yield _labelled(
            "model_info",
            "The model",
            version=model.version,
            quantization=model.quantization or "none",
            server_version=__version__,
        )


def _load(stats: CoreStats) -> Iterable[Metric]:
    running, waiting = float(stats.num_running), float(stats.num_waiting)
    yield _gauge("num_requests_running", "Choices in the batch", running)
    yield _gauge("num_requests_waiting", "Choices that wait for a place", waiting)
    yield _gauge("active_batch_size", "The same as num_requests_running", running)
    yield _gauge("request_queue_size", "The same as num_requests_waiting", waiting)
    yield CounterMetricFamily(
        "swiftjax_preemptions", "Running requests that gave way", float(stats.num_preemptions)
    )


def _cache(stats: CoreStats, served: Served) -> Iterable[Metric]:
    used = stats.num_pages - stats.num_free_pages
    yield _gauge("kv_cache_usage_ratio", "Share of the pages in use", used / stats.num_pages)
    blocks = GaugeMetricFamily("swiftjax_kv_blocks", "KV pages by state", labels=["state"])
    blocks.add_metric(["used"], used)
    blocks.add_metric(["cached"], stats.num_idle_pages)
    blocks.add_metric(["free"], stats.num_free_pages - stats.num_idle_pages)
    yield blocks
    kept = float(stats.num_session_pages)
    yield _gauge("kv_session_blocks", "KV pages in use that idle sessions keep", kept)
    yield _labelled(
        "cache_config_info",
        "The KV cache",
        block_size=str(stats.page_size),
        num_gpu_blocks=str(stats.num_pages),
        dtype=served.model.dtype,
    )


def _steps(watch: EngineWatch, stats: CoreStats, *, is_pinged: bool) -> Iterable[Metric]:
    rate = watch.tokens_per_second()
    yield _gauge("tokens_per_second", "Generated tokens, over the last 10 seconds", rate)
    is_asked = is_pinged or stats.num_running + stats.num_waiting > 0
    age = time.monotonic() - watch.last_sign if is_asked else 0.0
    yield _gauge("engine_heartbeat_age_seconds", "Since the engine's last sign of life", age)


def _devices(report: DeviceReport) -> Iterable[Metric]:
    yield CounterMetricFamily(
        "swiftjax_jit_compiles", "Programs compiled since the server was ready", report.num_compiles
    )
    yield CounterMetricFamily(
        "swiftjax_jit_compile_seconds", "Time spent on that", report.compile_seconds
    )
    memory = GaugeMetricFamily(
        "swiftjax_device_memory_bytes", "Memory of each device", labels=["device", "kind"]
    )
    for device, in_use, limit in report.memory:
        memory.add_metric([device, "in_use"], in_use)
        memory.add_metric([device, "limit"], limit)
    yield memory
    used = sum(device.in_use for device in report.memory)
    yield _gauge("gpu_memory_used", "Bytes in use on all devices", float(used))


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"swiftjax_{name}", text, value)


def _labelled(name: str, text: str, **labels: str) -> Metric:
    family = GaugeMetricFamily(f"swiftjax_{name}", text, labels=list(labels))
    family.add_metric(list(labels.values()), 1.0)
    return family
