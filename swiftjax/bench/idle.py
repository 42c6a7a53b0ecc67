"""The timeline of a decode step: what the host does, and how much of it the device is idle.

Of the device a profile tells, whose details say what the time is made of: kernels a step, and the
longest by name.
"""

import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from heapq import nlargest
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import jax

from swiftjax.api import Engine
from swiftjax.bench.records import Figure
from swiftjax.bench.timeline import time_stages
from swiftjax.bench.workloads import random_prompts
from swiftjax.engine.request import GenerationConfig
from swiftjax.engine.whole_answer import PIECE

NUM_STEPS, NUM_NAMES = 40, 16
# What the host does for graphs, by XLA's names for it. An update is what a graph costs whose arrays
# lie elsewhere than in the step before.
HOST_EVENTS = {
    "command_buffer::execute": "graph_launches_per_step",
    "command_buffer::update": "graph_updates_per_step",
    "CudaKernel::Launch": "launches_outside_graphs_per_step",
}


class Span(NamedTuple):
    """One thing that a GPU did, in nanoseconds."""

    start: float
    end: float
    name: str


def measure_idle(engine: Engine, batches: Iterable[int], prompt_len: int) -> Iterator[Figure]:
    """Milliseconds of a step that the host works, and percent of it in which no kernel runs.

    The second only where kernels are seen in a profile, which takes a GPU.
    """
    for batch in batches:
        lengths = [prompt_len] * batch
        # Some get their first token while others' prompts are computed, a step for each at worst.
        max_new_tokens = batch + PIECE + NUM_STEPS + 40
        config = GenerationConfig(max_new_tokens=max_new_tokens, ignore_eos=True)
        waiting = {engine.add_request(p, config) for p in random_prompts(engine, lengths)}
        while waiting:  # once all have a first token, only decodes are left
            waiting -= {output.request_id for output in engine.step()}
        stages = time_stages(engine, PIECE)  # of each answer one piece becomes text
        worked = sum(ms for stage, ms in stages.items() if stage != "wait")
        yield Figure(
            workload="timeline", batch=batch, context=prompt_len, unit="ms/step", value=worked,
            spread=(worked, worked),
            details={"ms_by_stage": {name: round(ms, 4) for name, ms in stages.items()}},
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                start = time.perf_counter()
                for _ in range(NUM_STEPS):
                    engine.step()
                took = time.perf_counter() - start
            planes = _planes(Path(folder))
            spans = _kernel_spans(planes)
        assert engine.built.core.stats().num_running == batch, "answers ended too soon"
        while engine.built.core.has_work:
            engine.step()
        engine.get_completed_requests()
        if spans:
            idle = 100 * (1 - _covered(spans) / (spans[-1].end - spans[0].start))
            yield Figure(
                workload="idle", batch=batch, context=prompt_len, unit="% of the time", value=idle,
                spread=(idle, idle),
                details={
                    "ms_per_step_profiled": took / NUM_STEPS * 1e3,
                    **count_host_events(planes), **_made_of(spans),
                },
            )  # fmt: skip


def _planes(folder: Path) -> list[Any]:
    path = next(folder.rglob("*.xplane.pb"))
    return list(jax.profiler.ProfileData.from_file(str(path)).planes)


def count_host_events(planes: Iterable[Any]) -> dict[str, float]:
    """How often a step launches graphs, patches them, and launches kernels outside of them."""
    counts = dict.fromkeys(HOST_EVENTS.values(), 0)
    lines = (line for plane in planes if "GPU" not in plane.name for line in plane.lines)
    for event in (event for line in lines for event in line.events):
        if event.name in HOST_EVENTS:
            counts[HOST_EVENTS[event.name]] += 1
    return {name: round(count / NUM_STEPS, 2) for name, count in counts.items()}


def _kernel_spans(planes: Iterable[Any]) -> list[Span]:
    """Everything on the GPU's streams, sorted."""
    lines = (line for plane in planes if "GPU" in plane.name for line in plane.lines)
    return sorted(
        Span(event.start_ns, event.start_ns + event.duration_ns, event.name)
        for line in lines
        if line.name.startswith("Stream")
        for event in line.events
    )


def _made_of(spans: list[Span]) -> dict[str, object]:
    """Kernels and copies a step, and milliseconds a step by name; numbers in names are dropped."""
    times: defaultdict[str, float] = defaultdict(float)
    for start, end, name in spans:
        times[re.sub(r"[_.]?\d+", "", name)] += (end - start) / NUM_STEPS / 1e6
    longest = nlargest(NUM_NAMES, times.items(), key=itemgetter(1))
    return {
        "kernels_per_step": round(len(spans) / NUM_STEPS),
        "ms_by_kernel": {n: round(ms, 4) for n, ms in longest},
    }


def _covered(spans: list[Span]) -> float:
    busy, end = 0.0, spans[0].start
    for start, stop, _ in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy
