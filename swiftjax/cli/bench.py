"""`swiftjax bench`: decode, prefill, throughput and start-up times, as a table and as records.

Everything runs through the public Engine, with random weights or a real model. Speeds of single
kernels and of the bare step are measured beside it.
"""

import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swiftjax.cli.bench_report import FILES, compare_files, read_peaks, report, run_of
from swiftjax.cli.loading import load_core
from swiftjax.cli.options import (
    Deterministic,
    DtypeOption,
    Implementation,
    KVCacheDtypeOption,
    LoadFormatOption,
    QuantTypeOption,
    Quiet,
    quantization,
)
from swiftjax.config import EngineConfig, KVCacheDtype
from swiftjax.errors import InvalidRequestError

if TYPE_CHECKING:
    from swiftjax.api import Engine
    from swiftjax.bench.records import Figure

bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure speeds.")

ModelOption = Annotated[
    str,
    typer.Option(
        "--model", "--shape", help="A model, or with --load-format dummy a shape such as llama3-8b."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder for results; a folder per machine is made in it.", metavar="DIR"),
]
Commit = Annotated[
    str | None, typer.Option(help="Commit to record where there is no git.", show_default="git's")
]
Seqs = Annotated[int | None, typer.Option(help="Most sequences that run together.")]
Tokens = Annotated[int | None, typer.Option(help="Most tokens in a step.")]
Length = Annotated[int | None, typer.Option(help="Longest prompt plus answer, in tokens.")]
Overlap = Annotated[
    bool | None,
    typer.Option(help="Dispatch a step before the last one is read.", show_default="on a GPU"),
]


@bench.command()
def offline(
    model: ModelOption = "smollm2-135m",
    load_format: LoadFormatOption = "auto",
    workload: Annotated[
        list[str] | None, typer.Option(help="W1, W2, W3 (these by default), long, idle, memory.")
    ] = None,
    small: Annotated[bool, typer.Option(help="Few and short requests, for a CPU.")] = False,
    dtype: DtypeOption = None,
    quant_type: QuantTypeOption = None,
    kv_cache_dtype: KVCacheDtypeOption = "auto",
    max_batch_size: Seqs = None,
    max_num_batched_tokens: Tokens = None,
    max_model_len: Length = None,
    implementation: Implementation = None,
    overlap: Overlap = None,
    deterministic: Deterministic = False,
    out: Out = None,
    commit: Commit = None,
    quiet: Quiet = False,
) -> None:
    """Decode (W1), prefill (W2) and throughput (W3) through the Engine."""
    if "idle" in (workload or ()):
        # Otherwise a profile shows single launches where there would be graphs of them.
        flag = "--xla_enable_command_buffers_during_profiling=true"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    config = EngineConfig(
        model_path=model, load_format=load_format, dtype=dtype,
        quantization=quantization(quant_type), kv_cache_dtype=kv_cache_dtype,
        max_batch_size=max_batch_size,
        max_num_batched_tokens=max_num_batched_tokens, max_model_len=max_model_len,
        implementation=implementation, overlap=overlap, deterministic=deterministic,
        prefix_cache=False, swap_space_gib=0.0, max_queue_len=1 << 20,
    )  # fmt: skip
    built = load_core(config, warm=True, quiet=quiet)
    from swiftjax.api import Engine

    engine = Engine.from_core(built)
    run = run_of(built.model_config.dtype, model, commit, implementation)
    asked = {
        "deterministic": deterministic or None, "quant_type": quant_type, "overlap": overlap,
        "kv_cache_dtype": _stored(kv_cache_dtype),
    }  # fmt: skip
    run.flags.update({name: value for name, value in asked.items() if value is not None})
    names = workload or ["W1", "W2", "W3"]
    if unknown := set(names) - set(FILES):
        raise InvalidRequestError(
            f"workload {', '.join(sorted(unknown))} is unknown; choose from {', '.join(FILES)}"
        )
    for name in names:
        plain = built.model_config.quantization is None and kv_cache_dtype == "auto"
        report(_measure(engine, name, small=small, plain=plain), run, out, name)


def _stored(kv_cache_dtype: KVCacheDtype) -> KVCacheDtype | None:
    """What a record says of it: nothing of the model's own type."""
    return None if kv_cache_dtype == "auto" else kv_cache_dtype


def _measure(engine: "Engine", workload: str, *, small: bool, plain: bool) -> Iterable["Figure"]:
    from swiftjax.bench import workloads as w

    # The limits count two bytes a weight, a key and a value.
    peaks = read_peaks() if plain else None
    if workload == "W1":
        cases = (w.Decode(1, 64, 32), w.Decode(4, 64, 32)) if small else w.W1
        return w.measure_decode(engine, cases, peaks)
    if workload == "memory":
        return w.measure_memory(engine)
    if workload == "idle":
        from swiftjax.bench.idle import measure_idle

        return measure_idle(engine, (1, 4) if small else (8, 64, 256))
    if workload == "long":
        return w.measure_long(engine, w.Decode(1, 512, 32) if small else w.LONG, peaks)
    if workload == "W2":
        cases = (w.Prefill(1, 256), w.Prefill(4, 64)) if small else w.W2
        return w.measure_prefill(engine, cases, peaks)
    case = w.Throughput(32, (16, 64), (16, 64)) if small else w.Throughput()
    return [w.measure_throughput(engine, case)]


@bench.command()
def startup(
    model: ModelOption = "smollm2-135m",
    load_format: LoadFormatOption = "auto",
    max_batch_size: Seqs = None,
    max_num_batched_tokens: Tokens = None,
    max_model_len: Length = None,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """Time from the start of a process to its first token, as the caches are and once warm."""
    from swiftjax.bench.startup import measure_startup

    flags = [
        *("--model", model, "--load-format", load_format),
        *(x for name, value in [
            ("--max-batch-size", max_batch_size),
            ("--max-num-batched-tokens", max_num_batched_tokens),
            ("--max-model-len", max_model_len),
        ] if value is not None for x in (name, str(value))),
    ]  # fmt: skip
    figures, dtype = measure_startup(flags)
    report(figures, run_of(dtype, model, commit, None), out, "startup")


@bench.command()
def serving(
    model: ModelOption = "smollm2-135m",
    load_format: LoadFormatOption = "auto",
    rate: Annotated[list[float] | None, typer.Option(help="Requests a second.")] = None,
    protocol: Annotated[list[str] | None, typer.Option(help="grpc, http.")] = None,
    seconds: Annotated[float, typer.Option(help="How long requests arrive, per rate.")] = 60.0,
    workload: Annotated[list[str] | None, typer.Option(help="W3, W4 (by default).")] = None,
    small: Annotated[bool, typer.Option(help="Short requests, for a CPU.")] = False,
    max_num_seqs: Seqs = None,
    max_num_batched_tokens: Tokens = None,
    max_model_len: Length = None,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """Load on a server: Poisson arrivals (W4: latency, goodput) or all of W3 at once (tokens/s)."""
    from swiftjax.bench import serving as online
    from swiftjax.bench.lengths import Throughput

    # This process asks jax for the device's name only; its memory is the server's.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    given = {
        "--max-num-seqs": max_num_seqs,
        "--max-num-batched-tokens": max_num_batched_tokens,
        "--max-model-len": max_model_len,
    }
    flags = [x for name, value in given.items() if value is not None for x in (name, str(value))]
    flags = [model, "--load-format", load_format, *flags, "--no-prefix-cache"]
    case = Throughput(32, (8, 64), (8, 64)) if small else Throughput()
    workloads = workload or ["W4"]
    if unknown := set(workloads) - {"W3", "W4"}:
        raise InvalidRequestError(f"workload {', '.join(sorted(unknown))}: choose from W3, W4")
    rates = [None] if "W3" in workloads else []  # all at once
    rates += (rate or [2.0, 8.0, 16.0, 32.0]) if "W4" in workloads else []
    ports = online.Ports(grpc=online.free_port(), http=online.free_port())
    with online.serving(flags, ports) as served:
        for name, arrivals in itertools.product(protocol or ["grpc", "http"], rates):
            run = run_of(served.dtype, model, commit, None)
            run.flags.update(protocol=name, rate=arrivals)
            typer.echo(f"{name}, {'W3' if arrivals is None else f'{arrivals:g} requests/s'}")
            figures = online.measure(ports, name, arrivals, seconds, served.vocab_size, case)
            report(figures, run, out, "serving")


@bench.command()
def step(
    shape: Annotated[str, typer.Option(help="A shape such as llama3-8b.")] = "llama3-8b",
    batch: Annotated[list[int] | None, typer.Option(help="Sequences.")] = None,
    context: Annotated[list[int] | None, typer.Option(help="Tokens of each.")] = None,
    page_size: Annotated[int, typer.Option(help="Tokens in a KV page.")] = 64,
    quant_type: QuantTypeOption = None,
    kv_cache_dtype: KVCacheDtypeOption = "auto",
    implementation: Implementation = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Measure nothing; set two result files side by side.", metavar="A B"),
    ] = None,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """One bare decode step without engine, host and queue, with random weights."""
    if compare is not None:
        compare_files(*compare)
        return
    import jax

    from swiftjax import kernels
    from swiftjax.bench.step import StepCase, measure_steps
    from swiftjax.converters.quantize import with_quantization
    from swiftjax.kernel_choice import read_implementation
    from swiftjax.shapes import SHAPES

    if shape not in SHAPES:
        raise InvalidRequestError(f"shape {shape!r} is unknown; choose from {', '.join(SHAPES)}")
    chosen = implementation or kernels.choose_implementation(jax.default_backend())
    case = StepCase(
        batches=batch or [1, 8, 64, 256], contexts=context or [576], page_size=page_size,
        implementation=read_implementation(chosen) or "xla", kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    run = run_of(SHAPES[shape].dtype, shape, commit, chosen)
    asked = {"quant_type": quant_type, "kv_cache_dtype": _stored(kv_cache_dtype)}
    run.flags.update({name: value for name, value in asked.items() if value is not None})
    model = with_quantization(SHAPES[shape], quantization(quant_type))
    # The limits are those of weights, keys and values as the shape has them.
    peaks = None if quant_type or kv_cache_dtype != "auto" else read_peaks()
    report(measure_steps(model, case, peaks), run, out, "step")


@bench.command(name="kernels")
def kernel_speeds(
    implementation: Implementation = None, out: Out = None, commit: Commit = None
) -> None:
    """The attention kernels against ceilings of the same run; needs a GPU."""
    import jax

    from swiftjax.bench.kernel_speeds import measure_kernels
    from swiftjax.kernel_choice import read_implementation

    if jax.default_backend() != "gpu":
        raise InvalidRequestError("kernels are timed on a GPU; jax sees none: swiftjax doctor")
    chosen = read_implementation(implementation or "triton") or "triton"
    run = run_of("bfloat16", "llama3-8b heads", commit, chosen)
    report(measure_kernels(chosen), run, out, "kernels")


@bench.command()
def plot(
    file: Annotated[Path, typer.Argument(help="A result file of another bench command.")],
) -> None:
    """Draw curves, or how near each figure comes to its limit, as a picture beside the file."""
    from swiftjax.bench.plots import plot_file

    if not file.is_file():
        raise InvalidRequestError(f"{file} does not exist; give a result file such as latency.json")
    typer.echo(f"written to {plot_file(file)}")
