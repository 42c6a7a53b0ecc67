"""Kernels compiled for three GPUs, by the real Triton and ptxas, on a machine without any.

Asserts what only a compiler knows: that it compiles, shared memory, registers spilled, and how many
kernels a layer launches. One process with the CUDA plugin does it all (`compile_cases.py`).
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks.deviceless import settings
from benchmarks.gpu_targets import TARGETS
from tests.environments import ROOT, programs_of
from tests.kernels.compile_cases import (
    cases_of,
    chunk_cases,
    dense_cases,
    estimates,
    product_cases,
)

# The plugin with XLA and Triton in it, and ptxas: no library that only running needs.
PLUGIN = (
    "--no-deps",
    f"jax-cuda12-plugin=={jax.__version__}",
    f"jax-cuda12-pjrt=={jax.__version__}",
    "nvidia-cuda-nvcc-cu12==12.9.86",
)
NAMES = [(gpu, name) for gpu in TARGETS for name in cases_of(gpu)]

# Bytes a thread, stores and loads together; whoever tunes these kernels wants them lower.
KNOWN_SPILLS = {
    ("a100", "llama3-8b", "ragged_attention"): 40,
    ("a100", "prompt", "ragged_attention"): 1452,
    ("l4", "llama3-8b", "ragged_attention"): 40,
    ("l4", "prompt", "ragged_attention"): 1236,
    ("l4", "pages fp8", "ragged_attention"): 24,
    ("h200", "prompt", "ragged_attention"): 640,
    ("h200", "sinks", "ragged_attention"): 16,
    ("h200", "head 256", "decode_attention"): 380,
    ("h200", "sinks, head 256", "decode_attention"): 376,
    ("h200", "sinks, head 256", "ragged_attention"): 688,
}
# Norm, product, rotation and write, attention; product with residual; norm, product with silu;
# product with residual. jax 0.11's XLA has silu apart.
# fp8: attention; rounding, product, its parts with residual; rounding, product; rounding, product,
# its parts with residual; rounding, product, its parts, rotation and write.
KERNELS_A_LAYER = {"step": 8, "step fp8": 13}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The kernels of every case, by GPU and name."""
    (packages,) = programs_of("cuda", *PLUGIN).parent.glob("lib/python*/site-packages")
    out: Path = tmp_path_factory.mktemp("compiled") / "kernels.json"
    command = [sys.executable, "-m", "tests.kernels.compile_cases", str(out)]
    done = subprocess.run(
        command, env=settings(packages), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"after {done.stdout.splitlines()[-1:]}: {done.stderr[-3000:]}"
    return json.loads(out.read_text())


@pytest.mark.parametrize(("gpu", "name"), NAMES)
def test_shared_memory_is_there_and_was_foreseen(compiled: Any, gpu: str, name: str) -> None:
    foreseen = {} if name.startswith(("products", "rows")) else estimates(gpu, name)
    seen = {kernel["name"]: kernel["shared"] for kernel in compiled[f"{gpu} {name}"]}
    assert foreseen.keys() <= seen.keys()
    for kernel, shared in seen.items():
        assert shared <= foreseen.get(kernel, TARGETS[gpu].shared_per_program), kernel
    if gpu == "h200" and not name.startswith(("pages", "products", "rows")):
        assert seen["ragged_attention"] == foreseen["ragged_attention"]


@pytest.mark.parametrize(("gpu", "name"), NAMES)
def test_registers_are_enough(compiled: Any, gpu: str, name: str) -> None:
    for kernel in compiled[f"{gpu} {name}"]:
        known = KNOWN_SPILLS.get((gpu, name, kernel["name"]), 0)
        assert kernel["spilled"] <= known, kernel


@pytest.mark.parametrize("name", [*chunk_cases(), *product_cases()])
def test_mosaic_kernels_keep_their_state_in_registers(compiled: Any, name: str) -> None:
    (kernel,) = compiled[f"mosaic {name}"]
    # A third each; the computing warpgroups then take what the loading one gives back.
    assert kernel == {"registers": 168, "spilled": 0}


@pytest.mark.parametrize("name", dense_cases())
def test_dense_products_keep_their_sums_in_registers(compiled: Any, name: str) -> None:
    (kernel,) = compiled[f"mosaic {name}"]
    assert kernel["spilled"] == 0


@pytest.mark.parametrize("step", KERNELS_A_LAYER)
def test_a_layer_launches_no_more_kernels_than_it_did(compiled: Any, step: str) -> None:
    names = [kernel["name"] for kernel in compiled[f"h200 {step}"]]
    first, second = (i for i, name in enumerate(names) if name == "decode_attention")
    assert second - first == KERNELS_A_LAYER[step], names[first:second]
