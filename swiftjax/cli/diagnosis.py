"""Collects what `doctor` reports: plain values that also go out as JSON.

Every check that fails becomes a problem with its fix; nothing here raises.
"""

import importlib.metadata
import platform
import shutil
import subprocess
from typing import TypedDict

from swiftjax import __version__
from swiftjax.model_config import FAMILIES, ROPE_KINDS

PACKAGES = ("jax", "jaxlib", "flax", "grpcio", "protobuf", "tokenizers")
# jax's CUDA 13 wheels need this driver; older ones run the CUDA 12 wheels.
CUDA13_DRIVER = 580
CUDA12_DRIVER = 525


class Gpu(TypedDict):
    """A GPU as the driver sees it."""

    name: str
    memory_mib: int
    used_mib: int


class Device(TypedDict):
    """A device as jax sees it; `memory_mib` is None where jax does not say."""

    platform: str
    kind: str
    memory_mib: int | None


class Problem(TypedDict):
    """What is wrong and what to do about it."""

    what: str
    fix: str


class Report(TypedDict):
    """All that `doctor` knows."""

    versions: dict[str, str | None]
    driver: str | None
    gpus: list[Gpu]
    devices: list[Device]
    implementation: str | None
    implementations: list[str]
    families: list[str]
    rope_kinds: list[str]
    problems: list[Problem]


def diagnose() -> Report:
    """Look at the machine; takes the seconds that jax needs to start."""
    problems: list[Problem] = []
    driver, gpus = read_driver(problems)
    devices = _devices(problems, driver)
    check_gpus(problems, driver, gpus, devices)
    _check_grpc(problems)
    implementation, implementations = _implementation(problems, devices)
    return Report(
        versions={
            "python": platform.python_version(),
            "swiftjax": __version__,
            **{package: _version(package) for package in PACKAGES},
        },
        driver=driver,
        gpus=gpus,
        devices=devices,
        implementation=implementation,
        implementations=implementations,
        families=sorted(FAMILIES),
        rope_kinds=list(ROPE_KINDS),
        problems=problems,
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_driver(problems: list[Problem]) -> tuple[str | None, list[Gpu]]:
    """Ask nvidia-smi for the driver's version and the GPUs."""
    if shutil.which("nvidia-smi") is None:
        return None, []
    query = "--query-gpu=driver_version,name,memory.total,memory.used"
    try:
        result = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        rows = [[cell.strip() for cell in row.split(",")] for row in result.stdout.splitlines()]
        gpus = [Gpu(name=r[1], memory_mib=int(r[2]), used_mib=int(r[3])) for r in rows]
        return rows[0][0], gpus
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        problems.append(
            Problem(
                what=f"nvidia-smi does not work: {error}",
                fix="load or reinstall the NVIDIA driver, then run nvidia-smi by hand",
            )
        )
        return None, []


def _devices(problems: list[Problem], driver: str | None) -> list[Device]:
    try:
        import jax

        # A look must not take the memory that a server on the same GPU needs.
        jax.config.update("jax_pjrt_client_create_options", {"preallocate": False})
        found = jax.devices()
    except Exception as error:  # jax raises many classes here; each of them is a finding
        text = " ".join(str(error).split())[:300]
        problems.append(Problem(what=f"jax finds no device: {text}", fix=install_hint(driver)))
        return []
    devices: list[Device] = []
    for device in found:
        limit = (device.memory_stats() or {}).get("bytes_limit")
        memory_mib = None if limit is None else limit // 2**20
        devices.append(
            Device(platform=device.platform, kind=device.device_kind, memory_mib=memory_mib)
        )
    return devices


def install_hint(driver: str | None) -> str:
    """Name the extra that fits the driver."""
    if driver is None:
        return "pip install --upgrade swiftjax"
    extra = "cuda13" if _major(driver) >= CUDA13_DRIVER else "cuda12"
    return f"pip install --upgrade 'swiftjax[{extra}]'"


def _major(driver: str) -> int:
    head = driver.split(".")[0]
    return int(head) if head.isdigit() else 0


def check_gpus(
    problems: list[Problem], driver: str | None, gpus: list[Gpu], devices: list[Device]
) -> None:
    """Find a GPU that jax does not use, a driver too old for it, and memory others hold."""
    if driver is not None and _major(driver) < CUDA12_DRIVER:
        problems.append(
            Problem(
                what=f"driver {driver} is too old for jax, which needs {CUDA12_DRIVER}",
                fix=f"install an NVIDIA driver of version {CUDA13_DRIVER} or newer",
            )
        )
    if gpus and devices and all(device["platform"] == "cpu" for device in devices):
        problems.append(
            Problem(
                what=f"there is an NVIDIA GPU ({gpus[0]['name']}) but jax runs on the CPU",
                fix=install_hint(driver) + "; also check that JAX_PLATFORMS is not set to cpu",
            )
        )
    for gpu in gpus:
        if gpu["used_mib"] > gpu["memory_mib"] // 10:
            free = 1 - gpu["used_mib"] / gpu["memory_mib"]
            problems.append(
                Problem(
                    what=f"{gpu['name']}: {gpu['used_mib']} of {gpu['memory_mib']} MiB are in use",
                    fix="end the other processes (nvidia-smi lists them), or use "
                    f"--gpu-memory-utilization {max(free - 0.05, 0.01):.2f}",
                )
            )


def _check_grpc(problems: list[Problem]) -> None:
    try:
        from swiftjax.serving import grpc_server  # noqa: F401  the import is the check
    except Exception as error:  # protobuf refuses a mismatch with classes of its own
        problems.append(
            Problem(
                what=f"the gRPC server cannot be imported: {error}",
                fix="pip install --upgrade grpcio grpcio-health-checking grpcio-reflection "
                "protobuf",
            )
        )


def _implementation(problems: list[Problem], devices: list[Device]) -> tuple[str | None, list[str]]:
    try:
        from swiftjax import kernels
    except Exception as error:
        problems.append(
            Problem(what=f"the kernels cannot be imported: {error}", fix=install_hint(None))
        )
        return None, []
    if not devices:
        return None, list(kernels.IMPLEMENTATIONS)
    return kernels.choose_implementation(devices[0]["platform"]), list(kernels.IMPLEMENTATIONS)
