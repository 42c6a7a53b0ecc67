"""Sinks and a window over paged keys, against the paper's rule in plain float64."""

from dataclasses import replace

import numpy as np
import pytest

from swiftjax.engine.streaming import Streaming
from swiftjax.kernels import Implementation
from swiftjax.model.params import random_params
from swiftjax.model_config import RopeConfig
from tests.forward import forward_logits
from tests.numpy_streaming import streaming_logits
from tests.tiny import TINY

CONFIG = replace(TINY, head_dim=16, tie_word_embeddings=False)
KINDS = {
    "default": RopeConfig(theta=100.0),
    "llama3": RopeConfig(kind="llama3", theta=500.0, factor=8.0, original_max_position=64),
    "yarn": RopeConfig(kind="yarn", theta=500.0, factor=4.0, original_max_position=64),
}
IDS = np.random.default_rng(1).integers(0, CONFIG.vocab_size, 150).tolist()


def check(
    rope: RopeConfig,
    streaming: Streaming,
    chunks: list[int],
    *,
    page_size: int = 4,
    num_layers: int = 2,
    implementation: Implementation = "xla",
    far: int = 0,
    layer_windows: tuple[int, ...] = (),
) -> None:
    config = replace(CONFIG, rope=rope, num_layers=num_layers, layer_windows=layer_windows)
    params = random_params(config, np.dtype("float32"))
    ids = IDS[: sum(chunks)]
    logits = forward_logits(
        config,
        params,
        ids,
        chunks=chunks,
        page_size=page_size,
        streaming=streaming,
        implementation=implementation,
        far=far,
    )
    expected = streaming_logits(config, params, ids, streaming)
    assert np.abs(expected).max() > 1  # large enough for 1e-4 to say something
    first = streaming.shared_len() if far else 0
    np.testing.assert_allclose(logits[first:], expected[first:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("rope", KINDS.values(), ids=KINDS)
def test_b061_every_step_equals_the_papers_rule(rope: RopeConfig) -> None:
    """Many evictions, and pages of 4 whose edges fall everywhere in a window of 13."""
    check(rope, Streaming(sink=4, window=13), [20, 9, 13, 1, 7] + [1] * 60)


@pytest.mark.parametrize(("sink", "window", "page_size"), [(0, 1, 4), (5, 8, 4), (4, 12, 16)])
def test_sinks_and_window_count_tokens_not_pages(sink: int, window: int, page_size: int) -> None:
    chunk = min(window, 11)
    chunks = [chunk] * (60 // chunk) + [1] * 20
    check(KINDS["default"], Streaming(sink=sink, window=window), chunks, page_size=page_size)


@pytest.mark.parametrize(
    ("window", "implementation"), [(6, "xla"), (20, "xla"), (24, "xla"), (6, "triton")]
)
def test_layers_with_windows_of_their_own_keep_them(
    window: int, implementation: Implementation
) -> None:
    """Shorter than the window of 20 of the stream, the same, and at least as long as its cache."""
    rope = KINDS["llama3"]
    chunks = [30, 20, *[1] * 4] if implementation == "triton" else [20, 9, 13, 1, 7, *[1] * 30]
    check(
        rope, Streaming(sink=4, window=20), chunks, implementation=implementation,
        page_size=16 if implementation == "triton" else 4, layer_windows=(window, 0),
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "far"), [("yarn", 1_200_001), ("llama3", 2_000_000_000)])
def test_angles_hold_far_beyond_a_million(kind: str, far: int) -> None:
    """In a single layer nothing of a full window tells where in the text it stands."""
    check(KINDS[kind], Streaming(sink=4, window=13), [17, 9] + [1] * 10, num_layers=1, far=far)


@pytest.mark.parametrize("kind", ["default", "yarn"])
def test_the_kernels_follow_it_too(kind: str) -> None:
    check(
        KINDS[kind], Streaming(sink=4, window=20), [30, 20, 1, 1, 1, 1],
        page_size=16, implementation="triton",
    )  # fmt: skip


def test_b061_until_the_window_is_full_it_is_ordinary_attention() -> None:
    params = random_params(CONFIG, np.dtype("float32"))
    chunks = [12] + [1] * 4
    plain = forward_logits(CONFIG, params, IDS[:16], chunks=chunks, page_size=4)
    logits = forward_logits(
        CONFIG, params, IDS[:16], chunks=chunks, page_size=4, streaming=Streaming(sink=4, window=12)
    )
    # Two programs: a processor with AVX-512 sums a few of their scores in another order.
    np.testing.assert_allclose(logits, plain, rtol=0, atol=1e-5)
