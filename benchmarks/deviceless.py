"""Compiles for a GPU on a machine without one, and tells what the compiler then knows.

XLA, Triton and ptxas of jax's CUDA plugin do the work; only the target is described to them, by
`gpu_targets.py`. Products are not autotuned, so libraries may be chosen otherwise than on a card.
Call `compile_for` in a process with the environment of `settings`: as a command, `python -m
benchmarks.deviceless PACKAGES SCRIPT ...` runs a script in one.
"""

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax.experimental import topologies
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    SingleDeviceSharding,
    use_abstract_mesh,
)

from benchmarks.gpu_targets import Target
from swiftjax.kernels import _triton


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One launch of a compiled program; memory in bytes."""

    name: str
    grid: tuple[int, ...]
    threads: int
    shared: int  # that the launch asks for
    registers: int  # per thread; 0 where the kernel comes from a library
    spilled: int  # per thread, stores and loads together


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """What came of a program: its launches in order, library calls and copies among them."""

    kernels: list[Kernel]
    others: list[str]  # kinds of thunks that are not kernels of the compiler
    mosaic: list[tuple[int, int]]  # registers and bytes spilled of kernels among the others
    ptx: list[str]  # one text for each kernel that was compiled
    hlo: str


def settings(packages: Path) -> dict[str, str]:
    """Environment of a process in which `compile_for` works, with the plugin in `packages`."""
    root = Path(__file__).resolve().parent.parent
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(root), str(packages))),
        # The plugin wants to see libraries that only running needs.
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_PLATFORMS": "",
        # The tests do without them on a CPU.
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
        # ptxas then tells registers and spills, on standard error.
        "TF_CPP_VMODULE": "subprocess_compilation=2",
        "TF_CPP_MIN_LOG_LEVEL": "0",
    }


def compile_for(
    target: Target,
    f: Callable[..., Any],
    *specs: Any,
    donate: tuple[int, ...] = (),
    options: dict[str, Any] | None = None,
) -> Compiled:
    """Compile `jit(f)` for arguments of these shapes, with XLA flags; raises what XLA does."""
    sharding = SingleDeviceSharding(_device(target))
    jitted = jax.jit(f, in_shardings=sharding, out_shardings=sharding, donate_argnums=donate)
    with as_on(target), tempfile.TemporaryDirectory() as folder, _mosaic_tells(folder):
        lowered = jitted.trace(*specs).lower(lowering_platforms=("cuda",))
        with _standard_error(Path(folder) / "log") as log:
            compiled = lowered.compile({**(options or {}), "xla_dump_to": folder})
        (thunks,) = Path(folder).glob("*thunk_sequence.txt")
        mosaic = "".join(path.read_text() for path in sorted(Path(folder).glob("*.ptxas")))
        ptx = [path.read_text() for path in sorted(Path(folder).glob("*.ptx"))]
        kernels, others = read_thunks(thunks.read_text(), read_log(log.read_text()))
        return Compiled(
            kernels=kernels,
            others=others,
            mosaic=list(read_log(mosaic).values()),
            ptx=[x for x in ptx if x],
            hlo=compiled.as_text() or "",
        )


@contextmanager
def as_on(target: Target) -> Iterator[None]:
    """Kernels are made as they would be where this GPU is the default device."""
    device = AbstractDevice(device_kind=target.name, num_cores=target.cores, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    with (
        use_abstract_mesh(mesh),  # what Pallas asks for the device
        mock.patch.object(_triton, "is_interpreted", lambda: False),
        mock.patch.object(_triton, "capability", lambda: target.capability),
    ):
        yield


def _mosaic_tells(folder: str) -> Any:
    """Mosaic compiles by itself; it writes what ptxas says where these variables tell it to."""
    told = {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_TO": folder}
    return mock.patch.dict(os.environ, told)


def _device(target: Target) -> Any:
    described = topologies.get_topology_desc(
        platform="cuda", topology_name="1x1x1", topology="1x1x1", target_config=target.describe()
    )
    return described.devices[0]


@contextmanager
def _standard_error(path: Path) -> Iterator[Path]:
    """Send what this process, C++ included, writes to standard error into a file."""
    sys.stderr.flush()
    kept = os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield path
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def read_log(text: str) -> dict[str, tuple[int, int]]:
    """Registers and bytes spilled of each kernel, as `ptxas -v` prints them."""
    found = re.findall(
        r"Compiling entry function '(\S+)' for .*?\n"
        r".*?(\d+) bytes spill stores, (\d+) bytes spill loads\n.*?Used (\d+) registers",
        text,
        re.DOTALL,
    )
    return {name: (int(used), int(out) + int(back)) for name, out, back, used in found}


def read_thunks(text: str, used: dict[str, tuple[int, int]]) -> tuple[list[Kernel], list[str]]:
    """The launches of XLA's list of what a program does, and the kinds of everything else."""
    kernels, others = [], []
    for line in text.splitlines():
        if not (kind := re.match(r"\s*\d+: (\w+)", line)):
            continue
        launch = re.search(
            r"\] (\S+)\s+grid: \[(.*?)\] threads: \[(\d+), .*?\]\s+shared_memory: (\d+)", line
        )
        if launch is None:
            others.append(kind[1])
            continue
        name, grid, threads, shared = launch.groups()
        registers, spilled = used.get(name, (0, 0))
        kernels.append(
            Kernel(
                name=name,
                grid=tuple(map(int, grid.split(","))),
                threads=int(threads),
                shared=int(shared),
                registers=registers,
                spilled=spilled,
            )
        )
    return kernels, others


if __name__ == "__main__":
    os.execve(sys.executable, [sys.executable, *sys.argv[2:]], settings(Path(sys.argv[1])))
