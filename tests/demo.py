"""Engine cores over the demo model that share one compiled runner."""

import functools
from collections.abc import Callable

from swiftjax.build import BuiltCore, build_core
from swiftjax.config import EngineConfig, SchedulerConfig
from swiftjax.engine.core import EngineCore
from swiftjax.engine.page_pool import PagePool
from swiftjax.engine.preemption import PreemptionCosts
from swiftjax.engine.rows import RowTable
from swiftjax.engine.scheduler import Scheduler

PAGE, PAGES, ROWS, BUDGET, LENGTH = 8, 40, 4, 32, 72


@functools.cache
def build(checkpoint: str) -> BuiltCore:
    """A small engine in float32, built once."""
    return build_core(
        EngineConfig(
            model_path=checkpoint,
            max_batch_size=ROWS,
            max_model_len=LENGTH,
            page_size=PAGE,
            max_total_token_num=PAGES * PAGE,
            max_num_batched_tokens=BUDGET,
        )
    )


def core_over(
    checkpoint: str,
    config: SchedulerConfig,
    costs: PreemptionCosts,
    overlaps: bool,
    *,
    num_pages: int = PAGES,
    clock: Callable[[], float] = lambda: 0.0,
) -> EngineCore:
    """A core of its own over that runner; what it does not put into pages it never reads."""
    built = build(checkpoint)
    rows = RowTable(config.max_num_seqs, built.buckets.mixed[0].max_pages)
    scheduler = Scheduler(config, PagePool(num_pages, PAGE), rows, costs=costs)
    limits = built.core.limits
    return EngineCore(scheduler, built.runner, built.buckets, limits, clock, overlaps=overlaps)
