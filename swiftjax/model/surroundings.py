"""Everything outside a function and its arguments that shapes the program compiled from it.

Our own sources, what is installed, the device, its driver, the environment; and jax's settings.
When in doubt something is part of it: programs made again cost seconds, a wrong one is wrong.
Called by `kept_programs.py`.
"""

import hashlib
import logging
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jaxlib.version

import swiftjax

logger = logging.getLogger(__name__)

PACKAGE = Path(__file__).resolve().parent.parent
# Of variables that compilers and their libraries read.
PREFIXES = ("CUBLAS", "CUDA", "CUDNN", "JAX", "LD_", "LIBTPU", "LLVM", "MOSAIC", "NVIDIA", "TF_",
            "TRITON", "XLA")  # fmt: skip
# Where programs are looked for; not what they are.
PLACES = ("jax_compilation_cache_dir",)
# A file changed so soon before it was imported may have been imported in its older form: times of
# modification count in seconds, and a file server's clock is not this machine's. No longer, as the
# first start after an installation is to keep its programs.
SETTLED_SECONDS = 5


def surroundings() -> str | None:
    """All of it but the settings as text; None while the sources are being changed.

    Uses the default device. What a caller of this package replaced in its modules is not seen.
    """
    sources = source_hash(PACKAGE, swiftjax.IMPORTED_AT - SETTLED_SECONDS)
    if sources is None:
        logger.info("no programs are kept: the sources changed less than %s s ago", SETTLED_SECONDS)
        return None
    device = jax.devices()[0]
    parts = {
        "sources": sources,
        "python": sys.version,
        # As imported; what is installed may have been replaced since.
        "imported": (jax.__version__, jaxlib.version.__version__),
        "installed": list(_installed()),
        "device": (device.platform, device.id, device.device_kind),
        "client": (device.client.platform_version, device.client.runtime_type),
        "host": (platform.platform(), os.cpu_count(), _processor()),
        "driver": _read("/proc/driver/nvidia/version"),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(PREFIXES)},
    }
    return repr(parts)


def settings() -> str:
    """What jax is told now, and in this thread: asked for every program, since it may change."""
    return repr([(k, v) for k, v in sorted(jax.config.values.items()) if k not in PLACES])


def source_hash(package: Path, settled_before: float) -> str | None:
    """Hash names and contents of all Python files; None if one was changed since that time."""
    found = hashlib.sha256()
    for folder, folders, names in os.walk(package, followlinks=True):
        folders.sort()
        for name in sorted(names):
            if not name.endswith(".py"):
                continue
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                content = file.read()
                # Not the time of modification, which copies keep.
                if os.fstat(file.fileno()).st_ctime > settled_before:
                    return None
            head = f"{os.path.relpath(path, package)} {len(content)}\n"
            found.update(head.encode() + content)
    return found.hexdigest()


def _installed() -> Iterator[str]:
    """Names and versions of all distributions, by the folders that hold what is said of them."""
    for place in sys.path:
        try:
            names = os.listdir(place or ".")
        except OSError:
            continue
        yield from sorted(name for name in names if name.endswith((".dist-info", ".egg-info")))


def _processor() -> str:
    """Kind and abilities of the host's processor: programs for a CPU are made for just that."""
    first, _, _ = _read("/proc/cpuinfo").partition("\n\n")
    named = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU ")
    lines = [line for line in first.splitlines() if line.startswith(named)]
    return "\n".join(lines) or platform.processor()


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
