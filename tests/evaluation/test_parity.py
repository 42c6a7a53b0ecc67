"""Layer-by-layer comparison: states are right, files keep them, and a wrong layer is named."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from swiftjax.converters.load import LoadedCheckpoint, load_checkpoint
from swiftjax.errors import CheckpointError, InvalidRequestError
from swiftjax.evaluation.parity import (
    GOLDENS,
    differences,
    our_states,
    read_golden,
    write_golden,
)
from tests.forward import forward_logits
from tests.tiny_checkpoints import tiny_config, write_checkpoint

IDS = np.arange(3, 23, dtype=np.int32)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedCheckpoint:
    """A tiny random model of three layers."""
    path = tmp_path_factory.mktemp("tiny") / "model"
    return load_checkpoint(write_checkpoint(path, tiny_config(num_hidden_layers=3)), dtype=None)


def test_states_end_in_the_logits_of_the_model(loaded: LoadedCheckpoint) -> None:
    states = our_states(loaded, IDS, "xla")
    assert states.hidden.shape == (4, 20, 32)
    logits = forward_logits(loaded.config, loaded.params, IDS.tolist())
    np.testing.assert_allclose(states.logits, logits, atol=1e-5)


def test_a_wrong_layer_is_the_first_that_differs(loaded: LoadedCheckpoint) -> None:
    kernel = "layers.1.mlp.down.kernel"
    params = loaded.params | {kernel: loaded.params[kernel] * jnp.float32(1.01)}
    other = dataclasses.replace(loaded, params=params)
    found = differences(our_states(other, IDS, "xla"), our_states(loaded, IDS, "xla"))
    names = [difference.name for difference in found]
    assert names == ["embedding", "layer 0", "layer 1", "last norm", "logits"]
    assert [d.relative for d in found[:2]] == [0.0, 0.0]
    assert all(1e-4 < d.relative < 0.02 for d in found[2:])


def test_a_file_holds_a_sample(loaded: LoadedCheckpoint, tmp_path: Path) -> None:
    states = our_states(loaded, IDS, "xla")
    write_golden(tmp_path / "states.npz", states)
    stored = read_golden(tmp_path / "states.npz")
    assert stored.hidden.shape == (4, 20, 32) and stored.logits.shape == (20, 256)
    assert all(d.relative == 0 for d in differences(states, stored))
    whole = (tmp_path / "states.npz").read_bytes()
    for broken in (b"PK", b"", whole[:-30]):
        (tmp_path / "broken.npz").write_bytes(broken)
        with pytest.raises(CheckpointError, match="no file of hidden states"):
            read_golden(tmp_path / "broken.npz")


@pytest.mark.demo_model
def test_the_demo_model_is_what_transformers_computed(demo_checkpoint: Path) -> None:
    golden = read_golden(GOLDENS / "smollm2-135m.npz")
    loaded = load_checkpoint(demo_checkpoint, dtype=None)
    found = differences(our_states(loaded, golden.token_ids, "xla"), golden)
    assert len(found) == 32
    assert max(difference.relative for difference in found) < 1e-5


def test_states_of_another_model_are_refused(loaded: LoadedCheckpoint) -> None:
    golden = read_golden(GOLDENS / "smollm2-135m.npz")
    with pytest.raises(InvalidRequestError, match=r"3 layers of width 32; .* 30 layers"):
        differences(our_states(loaded, IDS, "xla"), golden)
