"""`swiftjax parity` on a tiny model and a file of its states."""

import json
from pathlib import Path

import numpy as np

from swiftjax.converters.load import load_checkpoint
from swiftjax.evaluation.parity import our_states, write_golden
from tests.cli.conftest import Cli


def test_a_rounded_model_differs_and_ends_with_1(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    ids = np.arange(3, 23, dtype=np.int32)
    write_golden(tmp_path / "g.npz", our_states(load_checkpoint(tiny, dtype=None), ids, "xla"))
    options = ["--golden", tmp_path / "g.npz", "--quiet"]
    rounded = cli("parity", tiny, *options, "--quant-type", "int8", "--json")
    assert rounded.returncode == 1, rounded.stderr
    found = {one["name"]: one["relative"] for one in json.loads(rounded.stdout)}
    assert found["embedding"] == 0 and 1e-3 < found["logits"] < 0.1
