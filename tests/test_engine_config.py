"""What EngineConfig refuses, each by its name, its value and what would be taken.

Runs in a process of its own: here the test run's type checks would speak first.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from swiftjax.config import QUEUE_POLICY_NAMES, EngineConfig
from swiftjax.engine.policies import QUEUE_POLICIES, PolicyState
from swiftjax.engine.request import Request
from swiftjax.model_config import DTYPES

ROOT = Path(__file__).resolve().parent.parent
BAD = {
    "gpu_memory_utilization": "0, -0.1, 1.1, float('nan'), '0.9', True",
    "swap_space_gib": "-1, float('nan'), float('inf'), '4', None",
    "max_batch_size": "0, -1, 2.5, '8', True",
    "max_total_token_num": "0, 'many'",
    "max_queue_len": "0, 1.0",
    "min_batch_size": "0, 2.5, '2', 2",  # 2 alone would hold nobody back
    "max_wait_ms": "-1, float('nan'), '10', 1e9, 5.5",
    "victim_policy": "'lottery', ''",
    "policy": "'lottery', '', None",
    "dtype": "'int8', 'float'",
}
TELL = """
from swiftjax.config import EngineConfig
from swiftjax.errors import InvalidRequestError
for value in [{values}]:
    try:
        print("taken:", repr(EngineConfig(model_path="m", {name}=value)))
    except InvalidRequestError as error:
        assert "{name}" in str(error) and repr(value) in str(error), error
        print("refused:", error)
"""


def refusals(name: str) -> str:
    """What is said about every bad value of one field."""
    code = TELL.format(name=name, values=BAD[name])
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert "taken" not in result.stdout
    return result.stdout


@pytest.mark.parametrize("name", BAD)
def test_bad_values_are_named(name: str) -> None:
    refusals(name)


def test_unknown_choices_list_the_known_ones() -> None:
    assert ", ".join(QUEUE_POLICY_NAMES) in refusals("policy")
    assert ", ".join(DTYPES) in refusals("dtype")


def test_a_policy_may_be_a_function() -> None:
    def last_come(request: Request, state: PolicyState) -> float:
        return -request.arrival_time

    assert EngineConfig(model_path="m", policy=last_come).policy is last_come


def test_every_policy_name_has_a_policy() -> None:
    assert tuple(QUEUE_POLICIES) == QUEUE_POLICY_NAMES
