"""Every bench command that runs on a CPU: figures printed, records of the agreed form written."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from swiftjax.bench.idle import NUM_STEPS, count_host_events
from swiftjax.bench.lengths import Throughput, throughput_lengths
from swiftjax.bench.limits import PEAKS, decode_ms, prefill_ms
from swiftjax.bench.plots import plot_file
from swiftjax.bench.records import Figure, Run, make_record, write_records
from swiftjax.bench.timeline import STAGES
from swiftjax.shapes import SHAPES
from tests.cli.conftest import Cli

FIELDS = {"workload", "model", "dtype", "batch", "context", "value", "unit", "spread", "gpu",
          "driver", "jax", "commit", "command", "date"}  # fmt: skip
DUMMY = ("--model", "tiny", "--load-format", "dummy", "--small")


def test_offline_writes_records(cli: Cli, tmp_path: Path) -> None:
    workloads = [x for name in ("W1", "W2", "W3", "long", "idle") for x in ("--workload", name)]
    result = cli(
        "bench", "offline", *DUMMY, *workloads, "--max-batch-size", "4",
        "--max-num-batched-tokens", "64", "--out", str(tmp_path),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    names = {path.stem for path in (tmp_path / "cpu").glob("*.json")}
    assert names == {"latency", "prefill", "throughput", "long_context", "idle"}
    for name in names:
        for record in json.loads((tmp_path / "cpu" / f"{name}.json").read_text()):
            assert record.keys() >= FIELDS
            assert str(tmp_path) not in record["command"]


def test_timelines_are_drawn(tmp_path: Path) -> None:
    stages = {name: 0.5 for name in STAGES}
    host = Figure(
        workload="timeline", batch=8, context=512, value=2.5, unit="ms/step", spread=(2.5, 2.5),
        details={"ms_by_stage": stages},
    )  # fmt: skip
    device = Figure(
        workload="idle", batch=8, context=512, value=1.5, unit="% of the time", spread=(1.5, 1.5),
        details={"ms_by_kernel": {}},
    )  # fmt: skip
    path = tmp_path / "idle.json"
    for kind in ("int4", "fp8"):  # whose bars have names of their own
        run = Run(model="m", dtype="bf16", command="c", commit="abc", flags={"quant_type": kind})
        write_records(path, [make_record(figure, run) for figure in (host, device)])
    assert plot_file(path).stat().st_size > 0


def test_what_the_host_does_for_graphs_is_counted() -> None:
    """In a profile of the form that jax reads; XLA's names are those of jax 0.11."""

    def plane(name: str, *events: str) -> SimpleNamespace:
        line = SimpleNamespace(events=[SimpleNamespace(name=event) for event in events])
        return SimpleNamespace(name=name, lines=[line])

    host = plane("/host:CPU", *["command_buffer::execute"] * 2 * NUM_STEPS, "CudaKernel::Launch")
    device = plane("/device:GPU:0", "command_buffer::update")
    assert count_host_events([host, device]) == {
        "graph_launches_per_step": 2,
        "graph_updates_per_step": 0,
        "launches_outside_graphs_per_step": round(1 / NUM_STEPS, 2),
    }


def test_step_and_comparison(cli: Cli, tmp_path: Path) -> None:
    flags = ("--shape", "tiny", "--batch", "2", "--context", "32", "--page-size", "16")
    result = cli("bench", "step", *flags, "--out", str(tmp_path))
    assert result.returncode == 0, result.stderr
    path = str(tmp_path / "cpu" / "step.json")
    compared = cli("bench", "step", "--compare", path, path)
    assert compared.returncode == 0 and "x1.000" in compared.stdout


def test_serving_measures_both_protocols(cli: Cli, tmp_path: Path) -> None:
    """Fails by itself where a program was compiled after the server was ready."""
    sizes = ("--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--max-model-len", "128")
    load = ("--workload", "W3", "--workload", "W4", "--rate", "20", "--seconds", "0.3")
    result = cli("bench", "serving", *DUMMY, *sizes, *load, "--out", str(tmp_path))
    assert result.returncode == 0, result.stderr
    records = json.loads((tmp_path / "cpu" / "serving.json").read_text())
    found = {(r["protocol"], r["workload"]): r["value"] for r in records}
    for protocol in ("grpc", "http"):
        assert found[protocol, "W3-served"] > 0 and found[protocol, "W4-tokens"] > 0
        assert found[protocol, "W4-compiles"] == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("step", "--shape", "llama9"), "llama9"),
        (("serving", *DUMMY, "--protocol", "smtp"), "smtp"),
        (("serving", *DUMMY, "--rate", "0.1", "--seconds", "1"), "no request arrives at 0.1"),
        (("offline", *DUMMY, "--workload", "W9"), "W9"),
        (("offline", "--model", "llama9", "--load-format", "dummy"), "llama9"),
        (("kernels",), "GPU"),
        (("plot", "nothing.json"), "nothing.json"),
    ],
)
def test_mistakes_are_told(cli: Cli, arguments: tuple[str, ...], says: str) -> None:
    result = cli("bench", *arguments)
    assert result.returncode == 2 and says in result.stderr


def test_records_replace_older_ones_of_the_same_thing(tmp_path: Path) -> None:
    run = Run(model="m", dtype="bf16", command="c", commit="abc")

    def record(batch: int, value: float) -> dict[str, object]:
        figure = Figure(
            workload="W1", batch=batch, context=512, value=value, unit="ms/step",
            spread=(value, value), limit=2.0,
        )  # fmt: skip
        return make_record(figure, run)

    path = tmp_path / "latency.json"
    write_records(path, [record(1, 4.0), record(8, 5.0)])
    write_records(path, [record(1, 2.5)])
    found = {r["batch"]: (r["value"], r["fraction_of_limit"]) for r in json.loads(path.read_text())}
    assert found == {1: (2.5, 0.8), 8: (5.0, 0.4)}


def test_figures_of_quantised_weights_stand_beside_the_others(tmp_path: Path) -> None:
    figure = Figure(
        workload="W3", batch=1, context=8, value=1.0, unit="tokens/s", spread=(1.0, 1.0)
    )
    path = tmp_path / "throughput.json"
    for flags in ({}, {"quant_type": "int8"}, {"overlap": False}, {"quant_type": "int8"}):
        run = Run(model="m", dtype="bf16", command="c", commit="abc", flags=flags)
        write_records(path, [make_record(figure, run)])
    assert len(json.loads(path.read_text())) == 3


def test_limits_are_those_of_the_published_table() -> None:
    """Anchors for Llama-3-8B on an H200: bytes over 4.5 TB/s, FLOPs over 788 TFLOP/s."""
    config, peaks = SHAPES["llama3-8b"], PEAKS["NVIDIA H200"]
    for batch, context, want in [(1, 576, 3.35), (64, 576, 4.4), (256, 576, 9.2), (16, 8224, 7.2)]:
        assert decode_ms(config, batch, context, peaks) == pytest.approx(want, abs=0.05)
    assert prefill_ms(config, 1, 8192, peaks) == pytest.approx(176, abs=0.6)
    assert prefill_ms(config, 16, 1024, peaks) == pytest.approx(298, abs=0.6)


def test_lengths_of_w3_are_drawn_in_the_agreed_order() -> None:
    prompts, outputs = throughput_lengths(Throughput())
    assert len(prompts) == len(outputs) == 512
    assert (prompts[0], outputs[0]) == (229, 178)
    assert min(prompts) >= 64 and max(prompts) <= 512 and min(outputs) >= 64 and max(outputs) <= 256


def test_streaming_shows_time_pages_and_memory(cli: Cli, tmp_path: Path) -> None:
    sizes = ("--window", "60", "--tokens", "400", "--position", "900", "--steps", "8")
    result = cli(
        "bench", "streaming", "--model", "tiny", "--load-format", "dummy", *sizes,
        "--answer", "20", "--turns", "2", "--max-num-batched-tokens", "32", "--out", str(tmp_path),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "swiftjax: endless: " in result.stderr
    file = tmp_path / "cpu" / "streaming.json"
    records = json.loads(file.read_text())
    assert [(r["workload"], r["context"]) for r in records] == [
        ("endless", 400), ("position", 64), ("position", 900),
        ("turn", 20), ("turn, window again", 20), ("turn, each token", 20),
    ]  # fmt: skip
    endless = records[0]
    assert len(endless["pages"]) <= 2 and endless["tokens_at"][-1] == 400
    assert all(record.keys() >= FIELDS for record in records)
    assert cli("bench", "plot", str(file)).returncode == 0
    assert file.with_suffix(".png").stat().st_size > 1000
    file.write_text("[{")
    assert f"{file} is no file of records" in cli("bench", "plot", str(file)).stderr
