"""How fast a checkpoint is converted and loaded, and in how much memory.

    python -m benchmarks.convert [--layers 32] [--quant-type none --quant-type int8] [--folder DIR]

Writes random bfloat16 shards in the shape of an 8B model (16 GB with all its layers), converts them
with the command itself in a process of its own, and reads the result with and without verifying,
beside the plain bytes. Needs as much disk again for every type. Records go to
benchmarks/results/cpu/convert.json; a machine with a GPU names another place with --out.
"""

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from benchmarks.records import commit, cpu_name, write_records
from swiftjax.converters.hf_llama import model_rules
from swiftjax.model.checkpoint import NativeCheckpoint
from swiftjax.model.config_json import to_hf
from swiftjax.model_config import ModelConfig
from swiftjax.shapes import SHAPES

RESULTS = Path(__file__).parent / "results" / "cpu"
SHARD_BYTES = 5 * 10**9
BLOCK = 2**20  # values that are repeated: making fresh ones takes longer than writing them
GIB = 2**30
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
}


def shards(config: ModelConfig) -> Iterator[dict[str, tuple[int, ...]]]:
    """Names and shapes of the tensors, file by file."""
    shard: dict[str, tuple[int, ...]] = {}
    for rule in model_rules(config):
        for name, shape in rule.sources:
            shard[name] = shape
            if 2 * sum(map(np.prod, shard.values())) > SHARD_BYTES:
                yield shard
                shard = {}
    if shard:
        yield shard


def write_shard(path: Path, shard: dict[str, tuple[int, ...]], rng: np.random.Generator) -> None:
    """Write one safetensors file of small random values."""
    header, offset = {}, 0
    for name, shape in shard.items():
        size = 2 * int(np.prod(shape))
        header[name] = {
            "dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]
        }  # fmt: skip
        offset += size
    text = json.dumps(header).encode()
    block = (rng.standard_normal(BLOCK, np.float32) / 64).astype(ml_dtypes.bfloat16)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shard.values():
            left = int(np.prod(shape))
            start = int(rng.integers(BLOCK))
            while left:
                part = block[start : start + left]
                file.write(part.view(np.uint8).data)
                left, start = left - len(part), 0


def write_source(folder: Path, config: ModelConfig) -> int:
    """Write the whole directory; returns the bytes of its weights."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards(config)):
        file = f"model-{number + 1:05}.safetensors"
        write_shard(folder / file, shard, rng)
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(to_hf(config)))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


class Cost(NamedTuple):
    """What a command took."""

    seconds: float
    cpu_seconds: float
    peak_gib: float


def run_convert(source: Path, destination: Path, quant_type: str) -> Cost:
    """Run the command in a process of its own."""
    command = [sys.executable, "-m", "swiftjax.cli", "convert", str(source), str(destination)]
    start = time.perf_counter()
    process = subprocess.Popen([*command, "--quant-type", quant_type, "--quiet"])
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"convert ended with {os.waitstatus_to_exitcode(status)}")
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return Cost(time.perf_counter() - start, cpu_seconds, usage.ru_maxrss * 1024 / GIB)


def seconds_of(tensors: Iterator[object]) -> float:
    """How long it takes to go through all of them, keeping none."""
    start = time.perf_counter()
    for _ in tensors:
        pass
    return time.perf_counter() - start


def raw_reads(folder: Path) -> Iterator[object]:
    """The bytes of all files, in pieces, by one thread."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                while piece := file.read(16 * 2**20):
                    yield len(piece)


def write_rate(folder: Path) -> float:
    """GB/s at which the disk takes a file of 1 GiB and flushes it."""
    data, path = np.random.default_rng(0).bytes(64 * 2**20), folder / "rate"
    start = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(16):
            file.write(data)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return 16 * len(data) / 1e9 / seconds


def measure(folder: Path, config: ModelConfig, quant_types: list[str]) -> list[dict[str, Any]]:
    """Convert to every type and load it; one conversion stands on the disk at a time."""
    size = write_source(folder / "source", config)
    largest = 2 * config.vocab_size * config.hidden_size / GIB
    disk = write_rate(folder)
    records: list[dict[str, Any]] = []
    for kind in quant_types:
        place = folder / "native"
        load = os.getloadavg()[0]
        cost = run_convert(folder / "source", place, kind)
        bound = 3 * largest + 1
        native = NativeCheckpoint(place)
        written = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        plain = seconds_of(raw_reads(place / "params"))
        verified = seconds_of(native.read())
        unverified = seconds_of(native.read(verify=False))
        records += [
            {
                "workload": "convert", "quant_type": kind, "unit": "GB/s of source",
                "value": round(size / 1e9 / cost.seconds, 3),
                "seconds": round(cost.seconds, 1), "cpu_seconds": round(cost.cpu_seconds, 1),
                "load_average_before": round(load, 1),
                "source_gb": round(size / 1e9, 2), "written_gb": round(written / 1e9, 2),
                "disk_gb_per_s": round(disk, 3), "disk": "1 GiB written and flushed, before",
            },
            {
                "workload": "convert memory", "quant_type": kind, "value": round(cost.peak_gib, 2),
                "unit": "GiB at most", "limit": round(bound, 2),
                "fraction_of_limit": round(cost.peak_gib / bound, 3),
            },
            {
                "workload": "load verified", "quant_type": kind,
                "value": round(verified / plain, 2), "unit": "times the plain read",
                "seconds": round(verified, 2), "goal": 3.0,
            },
            {
                "workload": "load unverified", "quant_type": kind,
                "value": round(unverified / plain, 2), "unit": "times the plain read",
                "seconds": round(unverified, 2), "goal": 1.5,
            },
        ]  # fmt: skip
        shutil.rmtree(place)
    return records


def main() -> None:
    """Measure, print and write the records."""
    parser = argparse.ArgumentParser(description="Speed and memory of conversions and loads")
    parser.add_argument("--layers", type=int, default=SHAPES["llama3-8b"].num_layers)
    parser.add_argument("--quant-type", action="append")
    parser.add_argument("--folder", type=Path, help="where there is room on a disk")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    quant_types = asked.quant_type or ["none", "int8"]
    config = replace(SHAPES["llama3-8b"], num_layers=asked.layers)
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        records = measure(Path(folder), config, quant_types)
    types = " ".join(f"--quant-type {kind}" for kind in quant_types)
    common = {
        "model": f"llama3-8b, {asked.layers} layers", "dtype": "bf16", "machine": cpu_name(),
        "cpus": os.cpu_count(), "commit": commit(),
        "command": f"python -m benchmarks.convert --layers {asked.layers} {types}",
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    for record in records:
        print(
            f"{record['workload']:16} {record['quant_type']:6} {record['value']} {record['unit']}"
        )
    write_records(asked.out / "convert.json", [record | common for record in records])


if __name__ == "__main__":
    main()
