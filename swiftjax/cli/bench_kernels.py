"""`swiftjax bench step` and `kernels`: what the device does, without engine, host and queue."""

from pathlib import Path
from typing import Annotated

import typer

from swiftjax.cli.bench import Commit, Out, bench
from swiftjax.cli.bench_report import (
    check_known,
    compare_files,
    given,
    read_peaks,
    report,
    run_of,
    stored_type,
)
from swiftjax.cli.options import Implementation, KVCacheDtypeOption, QuantTypeOption, quantization
from swiftjax.errors import InvalidRequestError


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

    check_known("shape", [shape], SHAPES)
    chosen = implementation or kernels.choose_implementation(jax.default_backend())
    case = StepCase(
        batches=batch or [1, 8, 64, 256], contexts=context or [576], page_size=page_size,
        implementation=read_implementation(chosen) or "xla", kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    run = run_of(SHAPES[shape].dtype, shape, commit, chosen)
    run.flags.update(given(quant_type=quant_type, kv_cache_dtype=stored_type(kv_cache_dtype)))
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

    from swiftjax import kernels
    from swiftjax.bench.kernel_speeds import measure_kernels
    from swiftjax.kernel_choice import read_implementation

    if jax.default_backend() != "gpu":
        raise InvalidRequestError("kernels are timed on a GPU; jax sees none: swiftjax doctor")
    chosen = read_implementation(implementation) or kernels.choose_implementation("gpu")
    run = run_of("bfloat16", "llama3-8b heads", commit, chosen)
    report(measure_kernels(chosen), run, out, "kernels")
