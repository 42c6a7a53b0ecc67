"""Counts compilations and asks the devices about their memory, for metrics.

Counting starts when a `Devices` is made and covers the whole process. Called by the CLI.
"""

import jax
import jax.monitoring

from swiftjax.memory import DeviceMemory, DeviceReport

# Told once per compiled program, be it compiled or found in the persistent cache.
COMPILED = "/jax/core/compile/backend_compile_duration"


class Devices:
    """Counts from here to the end of the process, because jax has no way to stop listening."""

    def __init__(self) -> None:
        self._num_compiles = 0
        self._compile_seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def report(self) -> DeviceReport:
        """Give the counts so far and the memory in use now."""
        memory = []
        for device in jax.local_devices():
            stats = device.memory_stats()
            if stats:
                name = f"{device.platform}:{device.id}"
                in_use = stats.get("bytes_in_use", 0)
                memory.append(DeviceMemory(name, in_use, stats.get("bytes_limit", 0)))
        return DeviceReport(self._num_compiles, self._compile_seconds, tuple(memory))

    def _count(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILED:
            self._num_compiles += 1
            self._compile_seconds += duration_secs
