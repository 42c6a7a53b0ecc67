"""Many requests at once against one at a time, on a CPU, through the blocking engine.

    python -m benchmarks.cpu_throughput [--rounds 3]

The demo model in float32, 64 prompt and 64 output tokens, every prompt another one and the prefix
cache off. One engine serves both loads in turns, so that a drift of the machine meets both. Medians
go to benchmarks/results/cpu/throughput.json, with a plot.
"""

import argparse
import datetime
import importlib.metadata
import itertools
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.records import commit, cpu_name, write_records
from swiftjax import Engine, GenerationConfig

RESULTS = Path(__file__).parent / "results" / "cpu"
PROMPT_TOKENS, OUTPUT_TOKENS, AT_ONCE, ALONE = 64, 64, 32, 4
GOAL = 3.0


def make_prompts(engine: Engine, seeds: "itertools.count[int]", count: int) -> list[list[int]]:
    """Random tokens that no earlier prompt had."""
    vocab_size = engine.built.model_config.vocab_size
    return [
        np.random.default_rng(next(seeds)).integers(3, vocab_size, PROMPT_TOKENS).tolist()
        for _ in range(count)
    ]


def rate(engine: Engine, batches: list[list[list[int]]]) -> float:
    """Output tokens per second over batches of prompts, one batch after the other."""
    generation = GenerationConfig(max_new_tokens=OUTPUT_TOKENS, ignore_eos=True)
    count, start = 0, time.perf_counter()
    for prompts in batches:
        count += sum(len(answer.token_ids) for answer in engine.generate(prompts, generation))
    assert count == OUTPUT_TOKENS * sum(map(len, batches))
    return count / (time.perf_counter() - start)


def measure(rounds: int) -> dict[int, list[float]]:
    """Rates of every round, by the number of requests at once."""
    engine = Engine(
        "smollm2-135m", dtype="float32", max_batch_size=AT_ONCE, max_model_len=256,
        max_total_token_num=AT_ONCE * 256, prefix_cache=False,
    )  # fmt: skip
    engine.built.warm_up()
    seeds, rates = itertools.count(), {1: [], AT_ONCE: []}
    for number in range(rounds):
        alone = [[prompt] for prompt in make_prompts(engine, seeds, ALONE)]
        rates[1].append(rate(engine, alone))
        rates[AT_ONCE].append(rate(engine, [make_prompts(engine, seeds, AT_ONCE)]))
        print(f"round {number}: alone {rates[1][-1]:.1f}, {AT_ONCE} at once "
              f"{rates[AT_ONCE][-1]:.1f} output tokens/s", flush=True)  # fmt: skip
    return rates


def make_records(rates: dict[int, list[float]], command: str) -> list[dict[str, Any]]:
    """Median and range per load, then the ratio of the two."""
    common = {
        "model": "smollm2-135m", "dtype": "fp32", "context": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS, "machine": cpu_name(),
        "python": platform.python_version(), "jax": importlib.metadata.version("jax"),
        "commit": commit(), "command": command, "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    records: list[dict[str, Any]] = [
        {
            "workload": "requests at once", "batch": at_once, "unit": "output tokens/s",
            "value": round(statistics.median(values), 2),
            "spread": [round(min(values), 2), round(max(values), 2)], "runs": len(values),
        }
        | common
        for at_once, values in rates.items()
    ]  # fmt: skip
    ratio = records[1]["value"] / records[0]["value"]
    records.append(
        {"workload": "at once/alone", "batch": AT_ONCE, "unit": "ratio of output tokens/s",
         "value": round(ratio, 2), "goal": GOAL} | common
    )  # fmt: skip
    return records


def plot(records: list[dict[str, Any]]) -> None:
    """Draw both rates as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(4, 3), layout="constrained")
    names = ["one at a time", f"{AT_ONCE} at once"]
    bars = axes.bar(names, [record["value"] for record in records[:2]], color=["C7", "C0"])
    axes.bar_label(bars, fmt="%.0f")
    axes.set_ylabel("output tokens/s")
    axes.set_title(f"SmolLM2-135M fp32, {PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens", fontsize=9)
    figure.savefig(RESULTS / "throughput.png", dpi=120)


def main() -> None:
    """Measure, print and write the records."""
    parser = argparse.ArgumentParser(description="Requests at once against one at a time")
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    records = make_records(
        measure(rounds), f"python -m benchmarks.cpu_throughput --rounds {rounds}"
    )
    for record in records:
        print(f"{record['workload']:18} {record['batch']:3} {record['value']:8} {record['unit']}")
    write_records(RESULTS / "throughput.json", records)
    plot(records)


if __name__ == "__main__":
    main()
