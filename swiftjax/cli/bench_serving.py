"""`swiftjax bench serving`: load on a server that this command starts, over gRPC and HTTP."""

import itertools
import os
from typing import Annotated

import typer

from swiftjax.cli.bench import Commit, Length, ModelOption, Out, Seqs, Tokens, bench
from swiftjax.cli.bench_report import check_known, flags_of, report, run_of
from swiftjax.cli.options import ENGINE_DEFAULTS, GpuMemoryUtilization, LoadFormatOption
from swiftjax.errors import SwiftJaxError


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
    gpu_memory_utilization: GpuMemoryUtilization = ENGINE_DEFAULTS.gpu_memory_utilization,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """Load on a server: Poisson arrivals (W4: latency, goodput) or all of W3 at once (tokens/s).

    Fails when the server compiled a program during W4, after all figures are written.
    """
    from swiftjax.bench import serving as online
    from swiftjax.bench.lengths import Throughput

    # This process asks jax for the device's name only; its memory is the server's, which takes it
    # all at once: piece by piece, what lies between the pieces is lost.
    of_server = dict(os.environ)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    sizes = flags_of(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        gpu_memory_utilization=gpu_memory_utilization,
    )
    flags = [model, "--load-format", load_format, *sizes, "--no-prefix-cache"]
    case = Throughput(32, (8, 64), (8, 64)) if small else Throughput()
    workloads = workload or ["W4"]
    check_known("workload", workloads, ("W3", "W4"))
    protocols = protocol or ["grpc", "http"]
    check_known("protocol", protocols, ("grpc", "http"))
    rates = [None] if "W3" in workloads else []  # all at once
    rates += (rate or [2.0, 8.0, 16.0, 32.0]) if "W4" in workloads else []
    ports = online.Ports(grpc=online.free_port(), http=online.free_port())
    for per_second in rates:
        if per_second is not None:  # before the model is loaded
            online.arrivals(per_second, seconds, case.seed)
    num_compiles = 0.0
    with online.serving(flags, ports, of_server) as served:
        for name, per_second in itertools.product(protocols, rates):
            run = run_of(served.dtype, model, commit, None)
            run.flags.update(protocol=name, rate=per_second)
            typer.echo(f"{name}, {'W3' if per_second is None else f'{per_second:g} requests/s'}")
            figures = online.measure(ports, name, per_second, seconds, served.vocab_size, case)
            report(figures, run, out, "serving")
            num_compiles += sum(f.value for f in figures if f.workload == online.COMPILES)
    if num_compiles:
        raise SwiftJaxError(f"{num_compiles:g} programs were compiled while requests ran")
