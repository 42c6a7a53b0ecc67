"""Strict numerics for every test: no silent dtype or rank promotion. The demo model, once.

Compiled programs are kept in pytest's cache: most engines here run the same few.
"""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from hypothesis import HealthCheck, settings

from swiftjax.converters.convert import convert
from swiftjax.converters.demo_model import resolve_model

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# How long an example takes says more about the machine than about the code. A change is judged by
# the same examples every time; `make soak` looks for new ones.
settings.register_profile(
    "swiftjax",
    deadline=None,
    derandomize="SWIFTJAX_SOAK" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("swiftjax")
# What a shell without job control starts with `&` ignores interrupts, and so would the commands
# that tests start from here and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# jax's simulation of a GPU lets threads of XLA's pool wait for each other. By default that has one
# for each processor: too few, and a simulated kernel waits for ever.
os.environ.setdefault("NPROC", str(max(16, os.cpu_count() or 1)))
# Processes that share a GPU take what they need of it, not three quarters each.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def pytest_configure(config: pytest.Config) -> None:
    """Compile every program quickly and once, not once per engine and per run of the suite.

    Most of the time would go into LLVM, which makes programs fast that run here once: on a CPU it
    is told not to. `JAX_DISABLE_MOST_OPTIMIZATIONS=0 make test` compiles everything as for users.

    Each worker of pytest-xdist has a folder of its own: jax writes entries in place, and another
    process may find half of one.
    """
    if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ and not shutil.which("nvidia-smi"):
        jax.config.update("jax_disable_most_optimizations", True)
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # for the commands that tests start
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # (Which has no such attribute with `-p no:cacheprovider`.)
    if (cache := getattr(config, "cache", None)) is not None:
        worker = getattr(config, "workerinput", {}).get("workerid", "compiled")
        jax.config.update("jax_compilation_cache_dir", str(cache.mkdir(worker)))


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """What jax keeps of a file's functions it keeps for ever: gigabytes in the end, and slower."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model's GGUF file, from the user's cache."""
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="session")
def demo_checkpoint(demo_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as a native checkpoint in float32."""
    path = tmp_path_factory.mktemp("demo") / "checkpoint"
    convert(demo_gguf, path, dtype="float32")
    return path
