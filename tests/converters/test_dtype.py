"""Which dtype a model is loaded in, and casts that would lose a value altogether."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from swiftjax.errors import CheckpointError
from tests.converters.test_hf_llama import load
from tests.tiny_checkpoints import tiny_config, tiny_tensors


@pytest.mark.parametrize(
    ("keys", "stored", "expected"),
    [
        ({"dtype": "bfloat16"}, "float32", "bfloat16"),
        ({"torch_dtype": "bfloat16"}, "float32", "bfloat16"),
        ({"torch_dtype": "torch.float16"}, "float32", "float16"),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, "float32", "bfloat16"),
        ({}, "bfloat16", "bfloat16"),
        ({}, "float16", "float16"),
        ({}, "float32", "float32"),
        ({}, "float64", "float32"),
        ({}, "float8_e4m3fn", "float32"),
    ],
)
def test_b029_dtype_comes_from_the_config_or_the_file(
    tmp_path: Path, keys: dict[str, Any], stored: str, expected: str
) -> None:
    """Both spellings of the key count; without one it is the type most weights are stored in."""
    config = tiny_config()
    del config["torch_dtype"]
    tensors = tiny_tensors(config, dtype=stored)
    # 8-bit floats say nothing of the arithmetic: the device's default, float32 on a CPU.
    loaded = load(tmp_path / "m", config | keys, tensors)
    assert loaded.config.dtype == expected
    assert {str(p.dtype) for p in loaded.params.values()} == {expected}
    embedding = tensors["model.embed_tokens.weight"].astype(np.dtype(expected))
    assert np.array_equal(np.asarray(loaded.params["embed.embedding"]), embedding)


def test_b029_an_asked_dtype_wins(tmp_path: Path) -> None:
    loaded = load(tmp_path / "m", tiny_config(torch_dtype="float16"), dtype="bfloat16")
    assert loaded.config.dtype == "bfloat16"
    assert loaded.params["norm.scale"].dtype == jnp.bfloat16


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("value", [70000.0, -70000.0])
def test_b029_a_cast_that_overflows_is_refused(tmp_path: Path, stored: str, value: float) -> None:
    """70000 does not become infinity in float16: the tensor and the value are named."""
    tensors = tiny_tensors(tiny_config(), dtype=stored)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = value
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight holds -?7\d+.*6"):
        load(tmp_path / "m", tiny_config(torch_dtype="float16"), tensors)
    assert load(tmp_path / "ok", tiny_config(torch_dtype="bfloat16"), tensors).params


def test_b029_the_largest_value_that_fits_is_kept(tmp_path: Path) -> None:
    """65504 fits float16, and so does what rounds to it; an infinity in the file stays one."""
    tensors = tiny_tensors(tiny_config())
    tensors["model.norm.weight"][:3] = 65504.0, 65519.0, np.inf
    loaded = load(tmp_path / "m", tiny_config(torch_dtype="float16"), tensors)
    assert np.array_equal(np.asarray(loaded.params["norm.scale"])[:3], [65504, 65504, np.inf])


def test_float32_beyond_bfloat16_is_refused(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_config())
    tensors["model.norm.weight"][0] = np.finfo(np.float32).max
    assert float(ml_dtypes.finfo(ml_dtypes.bfloat16).max) < np.finfo(np.float32).max
    with pytest.raises(CheckpointError, match="bfloat16 cannot hold"):
        load(tmp_path / "m", tiny_config(torch_dtype="bfloat16"), tensors)
