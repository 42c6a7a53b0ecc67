"""GenerationConfig: values at the edges of what is taken."""

import pytest

from swiftjax.engine.generation import MIN_TEMPERATURE, GenerationConfig
from swiftjax.errors import InvalidRequestError


@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 5e-6])
def test_a_temperature_next_to_nothing_is_greedy(temperature: float) -> None:
    assert GenerationConfig(temperature=temperature).temperature == 0.0
    assert GenerationConfig(temperature=MIN_TEMPERATURE).temperature == MIN_TEMPERATURE


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": ((3, 1.0), (3, 1.0))}, "logit_bias names token 3 twice"),
        ({"bad_words_ids": ((1, -1),)}, "an id in a bad word is -1; it must lie in"),
        ({"bad_words_ids": ((1,) * 33,)}, "33 ids in a bad word; at most 32 are taken"),
        ({"stop_token_ids": (2**31,)}, "an id in stop_token_ids is 2147483648; it must lie"),
    ],
)
def test_refusals_read_well(fields: dict[str, tuple[object, ...]], message: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        GenerationConfig(**fields)  # type: ignore[arg-type]
    assert message in str(refusal.value)
