"""What rounding costs a layer of an 8B model, per format and method, where no text can tell.

    python -m benchmarks.rounding_methods                  # on a CPU, some minutes
    python -m benchmarks.rounding_methods --inputs 14336   # as the down projection has

Weights are heavy-tailed, inputs hang together and differ in size by channel, as those of language
models do. A figure is ||error of the product|| / ||product|| over these inputs; activations stay as
they are. Outputs are rounded independently, so a part of them stands for all. Records go to
benchmarks/results/cpu/rounding.json.
"""

import argparse
import datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from benchmarks.records import commit, write_records
from swiftjax.converters.awq import best_factor
from swiftjax.converters.calibration import round_matrix
from swiftjax.converters.grids import shape_of
from swiftjax.converters.round_to_nearest import round_to_nearest
from swiftjax.kernels import packed_int4
from swiftjax.model.layer_pass import second_moments
from swiftjax.quantization import WeightFormat

PATH = Path(__file__).parent / "results" / "cpu" / "rounding.json"
NUM_TOKENS, RANK = 8192, 1024
# (format, symmetric, methods)
CASES = [
    (WeightFormat(kind="int8"), False, ("rtn", "gptq")),
    (WeightFormat(kind="fp8"), False, ("rtn",)),
    (WeightFormat(kind="int4", group_size=128), True, ("rtn", "awq", "gptq")),
    (WeightFormat(kind="int4", group_size=128), False, ("rtn", "awq", "gptq")),
    (WeightFormat(kind="int4", group_size=64), False, ("rtn", "awq", "gptq")),
]


def draw_layer(
    num_inputs: int, num_outputs: int
) -> tuple[Float32[Array, "N K"], Float32[Array, "K K"]]:
    """Weights, and the moments of inputs."""
    rng = np.random.default_rng(0)
    weights = rng.standard_t(5, (num_outputs, num_inputs)).astype(np.float32) * 0.02
    mixing = rng.standard_normal((RANK, num_inputs)).astype(np.float32) / RANK**0.5
    sizes = np.exp(rng.standard_normal(num_inputs)).astype(np.float32)
    moments = jnp.zeros((num_inputs, num_inputs), jnp.float32)
    for _ in range(0, NUM_TOKENS, RANK):
        x = rng.standard_normal((RANK, RANK)).astype(np.float32) @ mixing
        x += 0.3 * rng.standard_normal(x.shape).astype(np.float32)
        moments += second_moments(jnp.asarray(x * sizes))
    return jnp.asarray(weights), moments


def rounded_by(
    weights: Float32[Array, "N K"],
    moments: Float32[Array, "K K"],
    form: WeightFormat,
    symmetric: bool,
    method: str,
) -> Float32[Array, "N K"]:
    """The weights that the rounded ones stand for."""
    factor = jnp.ones(weights.shape[1], jnp.float32)
    if method == "rtn":
        packed = {
            name: jnp.asarray(values)
            for name, values in round_to_nearest(np.asarray(weights), form, symmetric).items()
        }
    else:
        shape = shape_of(form, symmetric=symmetric)
        if method == "awq":
            factor = best_factor(weights, moments, shape, lambda power: power)
        scaled = moments / (factor[:, None] * factor[None, :])
        packed = round_matrix(weights * factor[None, :], scaled, shape, method)  # type: ignore[arg-type]
    if form.kind == "int4":
        dense = packed_int4.dequantize(
            packed["kernel"], packed["kernel_scale"], packed["kernel_zero"],
            num_inputs=weights.shape[1], group_size=form.group_size,
        )  # fmt: skip
    else:
        dense = packed["kernel"].astype(jnp.float32) * packed["kernel_scale"][:, None]
    return dense / factor[None, :]


@jax.jit
def output_error(
    wrong: Float32[Array, "N K"], weights: Float32[Array, "N K"], moments: Float32[Array, "K K"]
) -> Array:
    """Root of the squared error of all products over that of the products."""
    squares = [(jnp.dot(part, moments) * part).sum() for part in (wrong, weights)]
    return jnp.sqrt(squares[0] / squares[1])


def main() -> None:
    """Measure, print and write the records."""
    parser = argparse.ArgumentParser(description="Error of a rounded layer, by method")
    parser.add_argument("--inputs", type=int, default=4096)
    parser.add_argument("--outputs", type=int, default=256)
    args = parser.parse_args()
    weights, moments = draw_layer(args.inputs, args.outputs)
    command = (
        f"python -m benchmarks.rounding_methods --inputs {args.inputs} --outputs {args.outputs}"
    )
    records: list[dict[str, Any]] = []
    for form, symmetric, methods in CASES:
        for method in methods:
            dense = rounded_by(weights, moments, form, symmetric, method)
            error = float(output_error(dense - weights, weights, moments))
            group = (
                f" g{form.group_size} {'sym' if symmetric else 'asym'}" if form.group_size else ""
            )
            print(f"{form.kind}{group} {method}: {error:.3%}", flush=True)
            records.append({
                "workload": "rounding error of a layer", "batch": 1, "context": args.inputs,
                "value": round(error, 6), "unit": "relative", "outputs": args.outputs,
                "quant_type": form.kind, "group_size": form.group_size, "symmetric": symmetric,
                "method": method, "command": command,
                "commit": commit(), "date": datetime.date.today().isoformat(),
            })  # fmt: skip
    write_records(PATH, records)


if __name__ == "__main__":
    main()
