"""Time from the start of a process to its first token: a fresh process each time.

The first run finds the compile cache as it is, the second finds what the first left. The child is
this module: it builds a warm engine, generates one token and prints the clock.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np

from swiftjax.bench.records import Figure
from swiftjax.errors import SwiftJaxError
from swiftjax.model_config import Dtype


def measure_startup(flags: Sequence[str]) -> tuple[list[Figure], Dtype]:
    """Start twice; figures "start" (as found) and "start-warm", in seconds, and the dtype.

    Each says how long every part of the start took.
    """
    figures, dtype = [], None
    for workload in ("start", "start-warm"):
        start = time.time()
        command = [sys.executable, "-m", "swiftjax.bench.startup", *flags]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SwiftJaxError(f"the engine did not start: {done.stderr.strip()[-500:]}")
        told = json.loads(done.stdout.strip().split("\n")[-1])
        dtype, clock = told["dtype"], [start, *told["clock"].values()]
        spent = dict(zip(told["clock"], np.diff(clock).round(2).tolist(), strict=True))
        took = clock[-1] - start
        figures.append(
            Figure(
                workload=workload, batch=1, context=8, value=took, unit="s", spread=(took, took),
                details={"seconds": spent},
            )
        )  # fmt: skip
    return figures, dtype


def main() -> None:
    """Build a warm engine, make one token, print when each part was done."""
    import argparse

    import jax

    from swiftjax.api import Engine
    from swiftjax.build import build_core
    from swiftjax.config import EngineConfig
    from swiftjax.engine.request import GenerationConfig
    from swiftjax.sizing import configure_jax

    clock = {"imports": time.time()}
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    for name in ("--max-batch-size", "--max-num-batched-tokens", "--max-model-len"):
        parser.add_argument(name, type=int)
    args = parser.parse_args()
    config = EngineConfig(
        model_path=args.model,
        load_format=args.load_format,
        max_batch_size=args.max_batch_size,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
    )
    configure_jax(config.gpu_memory_utilization)
    jax.devices()
    clock["device"] = time.time()
    built = build_core(config, warms_up=True)
    clock["weights"] = time.time()
    built.warm_up()
    clock["programs"] = time.time()
    Engine.from_core(built).generate([[1] * 8], GenerationConfig(max_new_tokens=1))
    clock["first token"] = time.time()
    print(json.dumps({"clock": clock, "dtype": built.model_config.dtype}))


if __name__ == "__main__":
    main()
