"""One request on a CPU, SwiftJAX beside transformers: time to first token and decode tokens/s.

    python -m benchmarks.cpu_vs_transformers [--transformers-python PATH] [--rounds 3]

Both engines get the same fp32 weights (the demo model's GGUF, dequantised), the same prompt, the
same CPUs and as many threads. Each side runs in its own process, alone on the machine, in turns;
medians go to benchmarks/results/cpu/latency.json.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.records import commit, cpu_name, write_records

RESULTS = Path(__file__).parent / "results" / "cpu"
PROMPT_TOKENS, OUTPUT_TOKENS, THREADS, RUNS = 512, 128, 2, 3
METRICS = {"decode_tokens_per_s": "tokens/s", "first_token_s": "s to first token"}


def swiftjax_worker() -> None:
    """Time requests in this process and print one JSON object; the first run is a warm-up."""
    import numpy as np

    from swiftjax import Engine, GenerationConfig

    engine = Engine("smollm2-135m", dtype="float32")
    vocab_size = engine.built.model_config.vocab_size
    generation = GenerationConfig(max_new_tokens=OUTPUT_TOKENS, ignore_eos=True, temperature=0.0)
    runs = []
    for seed in range(1 + RUNS):  # another prompt each time, so that no cache can help
        prompt = np.random.default_rng(seed).integers(3, vocab_size, PROMPT_TOKENS).tolist()
        times, token_ids, start = [], [], time.perf_counter()
        request_id = engine.add_request(prompt, generation)
        while not engine.is_request_finished(request_id):
            new = [token for output in engine.step() for token in output.token_ids]
            times += [time.perf_counter()] * len(new)
            token_ids += new
        engine.get_completed_requests()
        runs.append(
            {
                "first_token_s": times[0] - start,
                "decode_tokens_per_s": (OUTPUT_TOKENS - 1) / (times[-1] - times[0]),
                "token_ids": token_ids,
            }
        )
    versions = {"jax": importlib.metadata.version("jax")}
    print(json.dumps({"runs": runs[1:], "versions": versions}))


def run_worker(command: list[str], cpus: list[int]) -> dict[str, Any]:
    """Run one side alone on the given CPUs; its last line of output is the answer."""
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": str(THREADS), "JAX_PLATFORMS": "cpu"},
        preexec_fn=lambda: os.sched_setaffinity(0, cpus),
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure(rounds: int, transformers_python: str) -> dict[str, list[dict[str, Any]]]:
    """Alternate the two sides so that a drift of the machine meets both."""
    from swiftjax.converters.demo_model import resolve_model

    sizes = ["--prompt", str(PROMPT_TOKENS), "--output", str(OUTPUT_TOKENS)]
    commands = {
        "swiftjax": [sys.executable, "-m", "benchmarks.cpu_vs_transformers", "--worker"],
        "transformers": [
            transformers_python, "-m", "benchmarks.transformers_worker",
            str(resolve_model("smollm2-135m")), *sizes, "--runs", str(RUNS),
            "--threads", str(THREADS),
        ],
    }  # fmt: skip
    cpus = sorted(os.sched_getaffinity(0))[:THREADS]
    answers: dict[str, list[dict[str, Any]]] = {engine: [] for engine in commands}
    for round_number in range(rounds):
        for engine, command in commands.items():
            load = os.getloadavg()[0]
            answer = run_worker(command, cpus)
            answers[engine].append(answer)
            for run in answer["runs"]:
                print(
                    f"round {round_number} {engine:12} first token {run['first_token_s']:.3f} s, "
                    f"decode {run['decode_tokens_per_s']:.1f} tokens/s (load before {load:.1f})"
                )
    return answers


def make_records(answers: dict[str, list[dict[str, Any]]], command: str) -> list[dict[str, Any]]:
    """Turn all runs into flat records: median and range per engine and metric, then ratios."""
    common = {
        "workload": "one request", "model": "smollm2-135m", "dtype": "fp32", "batch": 1,
        "context": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS, "threads": THREADS,
        "machine": cpu_name(), "python": platform.python_version(),
        "commit": commit(),
        "command": command, "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    for engine in answers.values():
        common |= engine[0]["versions"]
    records, medians = [], {}
    for metric, unit in METRICS.items():
        for engine, rounds in answers.items():
            values = [run[metric] for answer in rounds for run in answer["runs"]]
            medians[engine] = statistics.median(values)
            spread = [round(min(values), 4), round(max(values), 4)]
            value = round(medians[engine], 4)
            records.append(common | {"engine": engine, "value": value, "unit": unit,
                                     "spread": spread, "runs": len(values)})  # fmt: skip
        ratio = round(medians["swiftjax"] / medians["transformers"], 3)
        records.append(common | {"engine": "swiftjax/transformers", "value": ratio,
                                 "unit": f"ratio of {unit}"})  # fmt: skip
    return records


def equal_tokens(answers: dict[str, list[dict[str, Any]]]) -> int:
    """How many leading greedy tokens both engines agree on."""
    ours, theirs = (answers[name][0]["runs"][0]["token_ids"] for name in answers)
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((i for i, (a, b) in pairs if a != b), len(ours))


def plot(records: list[dict[str, Any]]) -> None:
    """Draw both metrics as bars beside the record file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(7, 3))
    for axis, unit in zip(axes, METRICS.values(), strict=True):
        rows = [r for r in records if r["unit"] == unit]
        axis.bar([r["engine"] for r in rows], [r["value"] for r in rows], color=["C0", "C7"])
        axis.set_title(unit)
    figure.suptitle(f"SmolLM2-135M fp32, {PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens, {THREADS} CPUs")
    figure.tight_layout()
    figure.savefig(RESULTS / "latency.png", dpi=120)


def main() -> None:
    """Measure, print and write the records."""
    parser = argparse.ArgumentParser(description="SwiftJAX beside transformers on a CPU")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--transformers-python", default=sys.executable, help="python that has torch, transformers"
    )
    args = parser.parse_args()
    if args.worker:
        swiftjax_worker()
        return
    answers = measure(args.rounds, args.transformers_python)
    command = shlex.join(["python", "-m", "benchmarks.cpu_vs_transformers", "--rounds",
                          str(args.rounds)])  # fmt: skip
    records = make_records(answers, command)
    for record in records:
        print(f"{record['engine']:24} {record['value']:8} {record['unit']}")
    print(f"greedy tokens in agreement: {equal_tokens(answers)} of {OUTPUT_TOKENS}")
    write_records(RESULTS / "latency.json", records)
    plot(records)


if __name__ == "__main__":
    main()
