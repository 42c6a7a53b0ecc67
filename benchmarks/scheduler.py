"""Host time of one step: schedule, build the batch, update; for every policy. And of a trace.

    python -m benchmarks.scheduler

256 sequences run while 0 to 10,000 requests wait; no device is involved. Medians go to
benchmarks/results/cpu/scheduler.json, with a plot: neither the queue nor the length of the
sequences should matter.
"""

import argparse
import datetime
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.records import commit, cpu_name, write_records
from swiftjax.batch import Batch, PageMoves, Sampled
from swiftjax.engine.batching import make_batch
from swiftjax.engine.core import EngineCore
from swiftjax.engine.policies import QUEUE_POLICIES
from swiftjax.engine.request import GenerationConfig
from swiftjax.engine.tracer import Tracer
from tests.fakes import FakePending, FakeRunner, make_fake_core, make_request

RESULTS = Path(__file__).parent / "results" / "cpu"
RUNNING, STEPS, PAGE_SIZE, PAGES = 256, 300, 16, 80_000
QUEUES = (0, 1_000, 10_000)
PROMPTS = (64, 1_024, 3_072)


class NoRunner(FakeRunner):
    """Takes no time."""

    def dispatch(self, batch: Batch, moves: PageMoves) -> FakePending:
        """Answer 1 everywhere."""
        return FakePending([1] * len(batch.sample_rows))


def busy_core(policy: str, num_waiting: int, prompt_len: int) -> EngineCore:
    """A core with all rows decoding and a queue behind them."""
    core = make_fake_core(
        vocab_size=1000, num_pages=PAGES, page_size=PAGE_SIZE, max_model_len=4096,
        max_num_seqs=RUNNING, max_num_batched_tokens=2048, max_queue_len=10**6, policy=policy,
        prefix_cache=True, runner=NoRunner(1000),
    )  # fmt: skip
    config = GenerationConfig(max_new_tokens=1000, ignore_eos=True)
    for i in range(RUNNING + num_waiting):
        prompt = [(i * 7 + j) % 1000 for j in range(prompt_len if i < RUNNING else 64)]
        core.submit(
            make_request(
                core, prompt, config, client_id=f"client {i % 7}", priority=i % 3, deadline=1e9
            )
        )
        if i == RUNNING - 1:  # these run; whatever comes later waits
            while core.stats().num_waiting or any(
                s.num_uncomputed > 1 for s in core.scheduler.sequences.running.values()
            ):
                core.step()
    return core


def time_steps(core: EngineCore, trace: Path) -> tuple[list[float], list[float], list[float]]:
    """Milliseconds of schedule + batch building, of update, and of tracing, per step."""
    planning, updating, tracing = [], [], []
    tracer = Tracer(trace, core.scheduler)
    num_slots = PAGES * PAGE_SIZE
    for _ in range(STEPS):
        start = time.perf_counter()
        plan = core.scheduler.schedule(0.0)
        make_batch(
            plan, core.scheduler.rows, core._buckets, page_size=PAGE_SIZE, num_slots=num_slots
        )
        middle = time.perf_counter()
        count = len(plan.work)
        outputs = core.scheduler.update(plan, Sampled([1] * count, [0.0] * count))
        end = time.perf_counter()
        tracer.planned(plan, 0.0)
        tracer.read(plan, outputs)
        planning.append((middle - start) * 1e3)
        updating.append((end - middle) * 1e3)
        tracing.append((time.perf_counter() - end) * 1e3)
    return planning, updating, tracing


def measure(trace: Path) -> list[dict[str, Any]]:
    """All policies over queue lengths, and the first one over sequence lengths too."""
    records = []
    for policy in sorted(QUEUE_POLICIES):
        cases = [(queue, PROMPTS[0]) for queue in QUEUES]
        cases += [(QUEUES[-1], prompt) for prompt in PROMPTS[1:]] if policy == "fcfs" else []
        for num_waiting, prompt_len in cases:
            planning, updating, tracing = time_steps(
                busy_core(policy, num_waiting, prompt_len), trace
            )
            record = {
                "workload": "schedule and build a step", "policy": policy, "batch": RUNNING,
                "waiting": num_waiting, "context": prompt_len, "unit": "ms/step",
                "value": round(statistics.median(planning), 4), "limit": 1.0,
                "spread": [round(min(planning), 4), round(max(planning), 4)],
                "update_ms": round(statistics.median(updating), 4),
                "trace_ms": round(statistics.median(tracing), 4), "steps": STEPS,
                "machine": cpu_name(), "commit": commit(),
                "command": "python -m benchmarks.scheduler",
                "date": datetime.date.today().isoformat(),
            }  # fmt: skip
            print(f"{policy:18} waiting {num_waiting:6} context {prompt_len:5}  "
                  f"{record['value']:.3f} ms, update {record['update_ms']:.3f} ms, "
                  f"trace {record['trace_ms']:.3f} ms")  # fmt: skip
            records.append(record)
    return records


def plot(records: list[dict[str, Any]]) -> None:
    """Draw time over queue length per policy, and over sequence length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3), sharey=True)
    for policy in sorted(QUEUE_POLICIES):
        rows = [r for r in records if r["policy"] == policy and r["context"] == PROMPTS[0]]
        left.plot([r["waiting"] for r in rows], [r["value"] for r in rows], "o-", label=policy)
    rows = [r for r in records if r["policy"] == "fcfs" and r["waiting"] == QUEUES[-1]]
    right.plot([r["context"] for r in rows], [r["value"] for r in rows], "o-")
    left.set_xlabel("requests waiting")
    right.set_xlabel("context of each sequence, tokens")
    left.set_ylabel("ms a step (median)")
    left.set_ylim(0, 1.2)
    left.axhline(1.0, color="C7", linestyle=":")
    left.legend(fontsize=7)
    figure.suptitle(f"Schedule and build a step, {RUNNING} running, one CPU core")
    figure.tight_layout()
    figure.savefig(RESULTS / "scheduler.png", dpi=120)


def main() -> None:
    """Measure, print and write the records."""
    argparse.ArgumentParser(description="Host time of a step").parse_args()
    with tempfile.TemporaryDirectory() as folder:
        records = measure(Path(folder) / "trace")
    write_records(RESULTS / "scheduler.json", records)
    plot(records)


if __name__ == "__main__":
    main()
