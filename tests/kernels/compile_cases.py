"""Compiles kernels for three GPUs and writes what the compiler says of them, as JSON.

Run by `test_compiled.py` in a process that has the CUDA plugin: `python -m
tests.kernels.compile_cases FILE`. One line on standard output per case, so that a crash names it.
"""

import dataclasses
import json
import sys
from pathlib import Path

import jax.numpy as jnp

from benchmarks.deviceless import as_on, compile_for
from benchmarks.gpu_targets import TARGETS
from swiftjax.batch import BatchShape
from swiftjax.converters.quantize import with_quantization
from swiftjax.model.assembly import make_programs
from swiftjax.model.compiler_options import FEW_KERNELS
from swiftjax.quantization import Quantization, QuantType
from swiftjax.shapes import SHAPES
from tests.kernels.cuda_cases import (
    MODELS,
    Case,
    Model,
    decode_case,
    decode_estimate,
    dense_case,
    matmul_case,
    ragged_case,
    ragged_estimate,
    rope_case,
    rows_case,
    together,
    write_case,
)

MIXED = {"num_tokens": 512, "num_seqs": 8}
PROMPT = {"num_tokens": 8192, "num_seqs": 1}
NUM_SEQS = 64


def all_ops(m: Model, stored: str = "plain") -> Case:
    """What a step of this model runs, with decode attention and that of mixed batches."""
    return together(
        decode_case(m, num_seqs=NUM_SEQS, stored=stored),
        ragged_case(m, **MIXED, stored=stored),
        rope_case(m, num_tokens=64, has_norm=m.group == 8, stored=stored),
        write_case(m, num_tokens=64, stored=stored),
    )


def products(num_tokens: int, *kinds: str) -> Case:
    """Products of a gate and up projection."""
    shape = {"outputs": 28672, "inputs": 4096, "dtype": jnp.bfloat16}
    return together(*(matmul_case(kind, num_tokens=num_tokens, **shape) for kind in kinds))


def rounding(*kinds: str) -> Case:
    """Rows of an 8B model, and of the widest there are with a width that is no power of two."""
    shapes = ({"hidden": 4096, "mlp": 14336}, {"hidden": 28672, "mlp": 28672})
    return together(
        *(
            rows_case(kind, num_tokens=64, **shape, dtype=jnp.bfloat16)
            for kind in kinds
            for shape in shapes
        )
    )


# What is compiled for a GPU: models with all ops, prompts, 8-bit pages, products. Float32 prompts
# take the compiler 10 s each and are left out.
EVERYWHERE = ("llama3-8b", "smollm2")
ONLY_H200 = ("page 16", "head 80", "head 256", "sinks", "sinks, head 256")
STORED = {"a100": ("int8",), "l4": ("fp8",), "h200": ("fp8",)}
KINDS = {"a100": ("int8", "int4/128"), "l4": ("fp8",), "h200": ("int8", "w8a8", "fp8", "int4/128")}


def cases_of(gpu: str) -> dict[str, Case]:
    """Everything to compile for a GPU, by name."""
    names = EVERYWHERE + (ONLY_H200 if gpu == "h200" else ())
    found = {name: all_ops(MODELS[name]) for name in names}
    found["prompt"] = ragged_case(MODELS["llama3-8b"], **PROMPT)
    for stored in STORED[gpu]:
        found[f"pages {stored}"] = all_ops(MODELS["llama3-8b"], stored)
    # 8 bits of pages are made where 8 bits of rows are.
    found["rows"] = rounding(*STORED[gpu])
    for num_tokens in (1, 64):
        found[f"products {num_tokens}"] = products(num_tokens, *KINDS[gpu])
    return found


def estimates(gpu: str, name: str) -> dict[str, int]:
    """Shared memory by the kernels' own estimate, by name of kernel."""
    with as_on(TARGETS[gpu]):
        if name.startswith("prompt"):
            return {"ragged_attention": ragged_estimate(MODELS["llama3-8b"], **PROMPT)}
        model = MODELS["llama3-8b" if name.startswith("pages") else name]
        return {
            "decode_attention": decode_estimate(model, num_seqs=NUM_SEQS),
            "ragged_attention": ragged_estimate(model, **MIXED),
        }


def step_case(kind: QuantType | None) -> Case:
    """A decode step of 64 sequences, two layers of the 8B model."""
    model = dataclasses.replace(SHAPES["llama3-8b"], num_layers=2, vocab_size=32000)
    model = with_quantization(model, Quantization(kind=kind) if kind else None)
    programs = make_programs(
        model, max_num_seqs=NUM_SEQS, num_pages=1000, page_size=64, max_model_len=8192,
        implementation="triton",
    )  # fmt: skip
    shape = BatchShape(num_tokens=NUM_SEQS, num_seqs=NUM_SEQS, max_pages=128)
    program = programs.forward_program(shape)
    return Case(program.step, program.arguments)


def chunk_cases() -> dict[str, Case]:
    """Long chunks on Hopper: wide and narrow heads, pages that fill a trip and not, a window."""
    model = MODELS["llama3-8b"]
    models = {
        "heads of 128": model,
        "heads of 64, pages of 16": model._replace(width=64, page=16),
        "window": model._replace(window=1024),
    }
    return {
        name: ragged_case(m, num_tokens=2048, num_seqs=8, implementation="mosaic")
        for name, m in models.items()
    }


def product_cases() -> dict[str, Case]:
    """Products on Hopper: sums that are scaled, in parts; four groups to a step."""
    sizes = {"outputs": 28672, "inputs": 4096}
    cases = {
        "int4, 16 tokens": ("int4/128", 16, {"outputs": 4096, "inputs": 14336}),
        "int4, 256 tokens": ("int4/32", 256, sizes),
    }
    return {
        name: matmul_case(kind, num_tokens=tokens, dtype=jnp.bfloat16, on_hopper=True, **shape)
        for name, (kind, tokens, shape) in cases.items()
    }


def dense_cases() -> dict[str, Case]:
    """Products of many tokens on Hopper, with all that may follow them, for each tile."""
    cases = {
        "bf16, gated": ("bfloat16", 1024, (4096, 28672), "gated"),
        "bf16, gates of few tokens": ("bfloat16", 64, (4096, 28672), "gated"),
        "bf16, residual": ("bfloat16", 2048, (4096, 4096), "residual"),
        "bf16, few tokens": ("bfloat16", 256, (4096, 4096), "residual"),
        "fp8": ("float8_e4m3fn", 512, (14336, 4096), "residual"),
    }
    return {name: dense_case(*numbers) for name, numbers in cases.items()}


def main(path: Path) -> None:
    """Compile everything."""
    found: dict[str, list[dict[str, object]]] = {}
    cases = [(gpu, name, case) for gpu in TARGETS for name, case in cases_of(gpu).items()]
    steps = [("h200", "step", step_case(None)), ("h200", "step fp8", step_case("fp8"))]
    for gpu, name, case in cases + steps:
        print(gpu, name, flush=True)
        donate, options = ((1,), dict(FEW_KERNELS)) if name.startswith("step") else ((), {})
        kernels = compile_for(
            TARGETS[gpu], case.run, *case.specs, donate=donate, options=options
        ).kernels
        found[f"{gpu} {name}"] = [dataclasses.asdict(kernel) for kernel in kernels]
    for name, case in (chunk_cases() | product_cases() | dense_cases()).items():
        print("mosaic", name, flush=True)
        used = compile_for(TARGETS["h200"], case.run, *case.specs).mosaic
        found[f"mosaic {name}"] = [{"registers": r, "spilled": s} for r, s in used]
    path.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
