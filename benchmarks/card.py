"""Takes every figure of `results/<gpu>` on this machine's GPU, one command after the other.

    python -m benchmarks.card --out benchmarks/results      # about an hour on an H200
    python -m benchmarks.card --only kernels --only start   # some of them; --list names all

A command that fails does not stop the others; a table of what was done comes last.
"""

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

DUMMY = "--model llama3-8b --load-format dummy"
LIMITS = "--max-num-batched-tokens 8192 --max-model-len 9216"
OFFLINE = f"swiftjax bench offline {DUMMY} --max-batch-size 256 {LIMITS}"
SERVING = f"swiftjax bench serving {DUMMY} --max-num-seqs 256 {LIMITS}"
STEP = "swiftjax bench step --batch 1 --batch 8 --batch 64 --batch 256"

# The dearest to know first, so that a run that is cut short is worth most.
RUNS = {
    "tests": "python -m pytest tests/gpu tests/model/test_deterministic.py -m gpu",
    "kernels": "swiftjax bench kernels",
    "kernels-triton": "swiftjax bench kernels --implementation triton",
    "offline": f"{OFFLINE} --workload W3 --workload W2 --workload W1 --workload idle",
    "prefill-triton": f"{OFFLINE} --implementation triton --workload W2 --workload W3",
    "prefill-cudnn": f"{OFFLINE} --prompt-attention cudnn --workload W2",
    "tiles": "python -m benchmarks.attention_tiles",
    "start": f"swiftjax bench startup {DUMMY} --max-batch-size 256 {LIMITS}",
    "deterministic": f"{OFFLINE} --deterministic --workload W1 --workload W3",
    "memory": f"{OFFLINE} --workload memory",
    "memory-1b": f"{OFFLINE.replace('8b', '1b')} --workload memory",
    "memory-70b": (
        "swiftjax bench offline --model llama3-70b --load-format dummy --quant-type int4 "
        "--max-batch-size 64 --max-num-batched-tokens 2048 --max-model-len 9216 --workload memory"
    ),
    "fp8": f"{OFFLINE} --quant-type fp8 --workload W1 --workload W2 --workload W3",
    "int4": f"{OFFLINE} --quant-type int4 --workload W1 --workload W2 --workload W3",
    "served": f"{SERVING} --workload W3 --workload W4",  # both protocols, four rates: 10 minutes
    "endless": "swiftjax bench streaming --dtype bfloat16 --part endless",
    "turns": f"swiftjax bench streaming {DUMMY} --part position --part turns --answer 1024",
    "products": "python -m benchmarks.quantized_matmul",
    "products-dense": "python -m benchmarks.dense_matmul",
    "products-compared": "python -m benchmarks.quantized_matmul --compare",
    "step": STEP,
    "step-fp8": f"{STEP} --quant-type fp8",
    "step-int4": f"{STEP} --quant-type int4",
    "step-kv-fp8": f"{STEP} --kv-cache-dtype fp8",
    "convert": "python -m benchmarks.convert --layers 8",
    "long": (
        f"swiftjax bench offline {DUMMY} --max-batch-size 4 --max-num-batched-tokens 8192 "
        "--workload long"
    ),
    "pages": (
        "python -m benchmarks.page_size --machine h200 --shape llama3-8b "
        "--implementation triton --batch 64 --context 576"
    ),
}


def arguments_of(command: str, out: Path) -> list[str]:
    """The command as this interpreter starts it; tests write no records."""
    program, *rest = shlex.split(command)
    start = [sys.executable, "-m", "swiftjax.cli"] if program == "swiftjax" else [sys.executable]
    return [*start, *rest, *([] if "pytest" in rest else ["--out", str(out)])]


def main() -> None:
    """Run what is asked for; the exit status says whether all went well."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--only", action="append", choices=RUNS, help="a run, several times")
    parser.add_argument("--list", action="store_true", help="print the commands and end")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    names, done = args.only or list(RUNS), []
    if args.list:
        print("\n".join(f"{name:16} {RUNS[name]}" for name in names))
        return
    for name in names:
        print(f"== {name}: {RUNS[name]}", flush=True)
        start = time.monotonic()
        status = subprocess.run(arguments_of(RUNS[name], args.out), check=False).returncode
        done.append((name, time.monotonic() - start, status))
    for name, seconds, status in done:
        print(f"{name:16} {seconds:7.0f} s  {'done' if status == 0 else f'failed ({status})'}")
    sys.exit(any(status for _, _, status in done))


if __name__ == "__main__":
    main()
