"""An engine whose requests stream unless they say otherwise."""

import pytest

from swiftjax.api import Engine
from swiftjax.build import build_core
from swiftjax.config import EngineConfig
from swiftjax.engine.request import GenerationConfig
from swiftjax.engine.streaming import Streaming
from swiftjax.errors import InvalidRequestError

LONG = GenerationConfig(max_new_tokens=200, ignore_eos=True)


def _config(**settings: int) -> EngineConfig:
    return EngineConfig(
        model_path="tiny", load_format="dummy", max_batch_size=2, max_num_batched_tokens=32,
        max_model_len=160, **settings,
    )  # fmt: skip


def test_requests_and_sessions_stream_unless_they_say_otherwise() -> None:
    engine = Engine.from_core(build_core(_config(streaming_window=16, streaming_sink=2)))
    asked = GenerationConfig(
        max_new_tokens=200, ignore_eos=True, streaming=Streaming(sink=2, window=16)
    )
    [plain], [explicit] = engine.generate([[1, 2, 3]], LONG), engine.generate([[1, 2, 3]], asked)
    assert len(plain.token_ids) == 200 and plain.token_ids == explicit.token_ids
    session = engine.open_session()
    session.append([1, 2, 3])
    assert session.generate(LONG).token_ids == plain.token_ids
    two = GenerationConfig(max_new_tokens=200, ignore_eos=True, n=2)  # can't stream
    [answer] = engine.generate([[1, 2, 3]], two)
    assert [len(choice.token_ids) for choice in answer.choices] == [157, 157]


def test_a_default_that_no_request_can_have_is_refused_at_the_start() -> None:
    with pytest.raises(InvalidRequestError, match="a request has at most 160: lower the window by"):
        build_core(_config(streaming_window=200))


@pytest.mark.parametrize("settings", [{"streaming_window": 0}, {"streaming_sink": -1}])
def test_senseless_defaults_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(InvalidRequestError, match="of streaming"):
        build_core(_config(**({"streaming_window": 16} | settings)))
