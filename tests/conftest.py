"""Strict numerics for every test: no silent dtype or rank promotion. The demo model, once."""

from pathlib import Path

import jax
import pytest
from hypothesis import HealthCheck, settings

from swiftjax.converters.convert import convert
from swiftjax.converters.demo_model import resolve_model

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# How long an example takes says more about the machine than about the code.
settings.register_profile("swiftjax", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("swiftjax")


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
