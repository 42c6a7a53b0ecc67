"""`swiftjax bench offline`: decode, prefill, throughput and more through the public Engine."""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from swiftjax.cli.bench_report import FILES, read_peaks, report, run_of
from swiftjax.cli.loading import load_core
from swiftjax.cli.options import (
    ENGINE_DEFAULTS,
    Deterministic,
    DtypeOption,
    GpuMemoryUtilization,
    GroupPrompts,
    Implementation,
    KVCacheDtypeOption,
    LoadFormatOption,
    PromptAttentionOption,
    QuantTypeOption,
    Quiet,
    quantization,
)
from swiftjax.config import EngineConfig

if TYPE_CHECKING:
    from swiftjax.api import Engine
    from swiftjax.bench.records import Figure

from swiftjax.cli.bench import Commit, Length, ModelOption, Out, Overlap, Seqs, Tokens, bench
from swiftjax.cli.bench_report import check_known, given, stored_type


@bench.command()
def offline(
    model: ModelOption = "smollm2-135m",
    load_format: LoadFormatOption = "auto",
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help="W1, W2, W3 (these by default), long, idle (timeline of a step), memory."
        ),
    ] = None,
    small: Annotated[bool, typer.Option(help="Few and short requests, for a CPU.")] = False,
    dtype: DtypeOption = None,
    quant_type: QuantTypeOption = None,
    kv_cache_dtype: KVCacheDtypeOption = "auto",
    max_batch_size: Seqs = None,
    max_num_batched_tokens: Tokens = None,
    max_model_len: Length = None,
    gpu_memory_utilization: GpuMemoryUtilization = ENGINE_DEFAULTS.gpu_memory_utilization,
    implementation: Implementation = None,
    overlap: Overlap = None,
    deterministic: Deterministic = False,
    prompt_attention: PromptAttentionOption = "paged",
    group_prompts: GroupPrompts = True,
    out: Out = None,
    commit: Commit = None,
    quiet: Quiet = False,
) -> None:
    """Decode (W1), prefill (W2) and throughput (W3) through the Engine."""
    names = workload or ["W1", "W2", "W3"]
    check_known("workload", names, FILES)
    if "idle" in names:
        # Otherwise a profile shows single launches where there would be graphs of them.
        flag = "--xla_enable_command_buffers_during_profiling=true"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    config = EngineConfig(
        model_path=model, load_format=load_format, dtype=dtype,
        quantization=quantization(quant_type), kv_cache_dtype=kv_cache_dtype,
        max_batch_size=max_batch_size,
        max_num_batched_tokens=max_num_batched_tokens, max_model_len=max_model_len,
        gpu_memory_utilization=gpu_memory_utilization,
        implementation=implementation, overlap=overlap, deterministic=deterministic,
        prompt_attention=prompt_attention, group_prompts=group_prompts,
        prefix_cache=False, swap_space_gib=0.0, max_queue_len=1 << 20,
    )  # fmt: skip
    built = load_core(config, warm=True, quiet=quiet)
    from swiftjax.api import Engine

    engine = Engine.from_core(built)
    run = run_of(built.model_config.dtype, model, commit, implementation)
    asked = given(
        deterministic=deterministic or None, quant_type=quant_type, overlap=overlap,
        kv_cache_dtype=stored_type(kv_cache_dtype),
        prompt_attention=None if prompt_attention == "paged" else prompt_attention,
        group_prompts=None if group_prompts else False,
    )  # fmt: skip
    run.flags.update(asked)
    plain = built.model_config.quantization is None and kv_cache_dtype == "auto"
    for name in names:
        report(_measure(engine, name, small=small, plain=plain), run, out, name)


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

        return measure_idle(engine, *(((1, 4), 64) if small else ((8, 64, 256), 512)))
    if workload == "long":
        return w.measure_long(engine, w.Decode(1, 512, 32) if small else w.LONG, peaks)
    if workload == "W2":
        cases = (w.Prefill(1, 256), w.Prefill(4, 64)) if small else w.W2
        return w.measure_prefill(engine, cases, peaks)
    case = w.Throughput(32, (16, 64), (16, 64)) if small else w.Throughput()
    return [w.measure_throughput(engine, case)]
