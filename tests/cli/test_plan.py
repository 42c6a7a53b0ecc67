"""`swiftjax plan` agrees with what an engine then takes, and refuses with numbers that fit."""

import json

import pytest

from swiftjax.build import build_core
from swiftjax.config import EngineConfig
from swiftjax.memory import fitting_sequences
from swiftjax.sizing import plan_engine
from tests.cli.conftest import Cli

TINY = ["plan", "tiny", "--load-format", "dummy"]


def test_plan_equals_what_is_built() -> None:
    config = EngineConfig(model_path="tiny", load_format="dummy", max_total_token_num=640)
    planned, built = plan_engine(config), build_core(config)
    assert built.memory.weights == planned.memory.weights
    assert built.memory.num_pages == planned.memory.num_pages == 40
    assert built.core.scheduler.pool.num_pages == 40


def test_plan_prints_what_fits(cli: Cli) -> None:
    result = cli(*TINY, "--max-total-token-num", "640", "--json")
    told = json.loads(result.stdout)
    assert result.returncode == 0
    assert told["max_total_token_num"] == 640 and told["max_model_len"] == 1024
    # 2 layers, keys and values, 2 heads of width 16, float32
    assert told["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4
    assert told["sequences_by_length"] == {"512": 1, "1024": 0}


def test_both_names_of_the_number_of_rows_are_known(cli: Cli) -> None:
    for name in ("--max-num-seqs", "--max-batch-size"):
        told = json.loads(cli(*TINY, name, "3", "--json").stdout)
        assert told["max_batch_size"] == 3


def test_plan_refuses_what_cannot_fit(cli: Cli) -> None:
    result = cli(*TINY, "--max-total-token-num", str(10**12))
    assert result.returncode == 2
    assert "fit (max_total_token_num=" in result.stderr


@pytest.mark.parametrize(("length", "count"), [(16, 8), (17, 8), (160, 4), (161, 3), (641, 0)])
def test_fitting_sequences(length: int, count: int) -> None:
    config = EngineConfig(model_path="tiny", load_format="dummy", max_total_token_num=640)
    assert fitting_sequences(plan_engine(config).memory, length, 8) == count
