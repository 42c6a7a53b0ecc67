"""The opt-in `prompt_attention="cudnn"`: which steps take it, its answers, what refuses it."""

from dataclasses import replace

import pytest

from swiftjax.batch import Sampled
from swiftjax.build import build_core
from swiftjax.config import EngineConfig
from swiftjax.engine.batching import make_batch
from swiftjax.engine.buckets import make_buckets
from swiftjax.engine.request import GenerationConfig
from swiftjax.errors import InvalidRequestError, UnsupportedError
from swiftjax.model.assembly import make_runner
from tests.fakes import make_fake_core, make_request, run_to_end
from tests.tiny import TINY, tiny_core, tiny_params
from tests.tiny_checkpoints import tiny_config, write_checkpoint

PROMPT = [5, 9, 2, 7, 7, 1, 8, 4, 4, 6, 3] * 3


def test_a_prompt_that_fills_the_largest_bucket_alone_has_a_program_of_its_own() -> None:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "max_pages": 8}
    plain, buckets = make_buckets(**sizes), make_buckets(**sizes).with_whole_prompt()
    special = replace(plain.mixed[-1], whole_prompt=True)
    assert set(buckets.all) == {*plain.all, special}
    assert buckets.choose(200, 1, whole_prompt=True) == special
    for choice in ((200, 1, False), (64, 1, True), (1, 1, True), (200, 2, False)):
        num_tokens, num_seqs, whole = choice
        shape = buckets.choose(num_tokens, num_seqs, whole_prompt=whole)
        assert shape == plain.choose(num_tokens, num_seqs) != special


def test_a_prompt_in_parts_or_in_the_cache_is_not_whole() -> None:
    core = make_fake_core(max_num_batched_tokens=64, num_pages=32, page_size=4, max_model_len=128)
    buckets = core._buckets.with_whole_prompt()
    seen = []
    for prompt in (list(range(100)), list(range(60)) + [7] * 40):
        core.submit(make_request(core, prompt, GenerationConfig(max_new_tokens=1)))
        while core.has_work:
            plan = core.scheduler.schedule(0.0)
            batch = make_batch(plan, core.scheduler.rows, buckets, page_size=4, num_slots=128)
            seen.append((plan.work[0].start, len(batch.token_ids), batch.shape.whole_prompt))
            core.scheduler.update(plan, Sampled([1], [0.0]))
    assert seen == [(0, 64, True), (64, 64, False), (60, 64, False)]


def test_a_core_answers_as_with_paged_attention() -> None:
    config = replace(TINY, dtype="bfloat16", num_layers=1)
    runner = make_runner(
        config, tiny_params(config), max_num_seqs=5, num_pages=64, page_size=16, max_model_len=512,
        implementation="xla",
    )  # fmt: skip
    answers: list[list[int]] = []
    for whole in (False, True):
        core = tiny_core(runner=runner)
        core._buckets = core._buckets.with_whole_prompt() if whole else core._buckets
        core.submit(make_request(core, PROMPT, GenerationConfig(max_new_tokens=1)))
        answers += run_to_end(core).values()
    assert answers[0] == answers[1]
    compiled = runner._programs._compiled
    chosen = [key[1] for key in compiled if key[0] == "forward" and key[1].whole_prompt]
    assert [shape.num_tokens for shape in chosen] == [64]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path = tmp_path_factory.mktemp("models") / "tiny"
    return EngineConfig(
        model_path=str(write_checkpoint(path, tiny_config(head_dim=16))),
        dtype="bfloat16", implementation="triton", prompt_attention="cudnn", page_size=16,
        max_batch_size=2, max_num_batched_tokens=12, max_model_len=64, max_total_token_num=256,
    )  # fmt: skip


def test_an_engine_has_it_if_asked(config: EngineConfig) -> None:
    asked, default = build_core(config), build_core(replace(config, prompt_attention="paged"))
    assert asked.buckets == default.buckets.with_whole_prompt() != default.buckets


def test_what_cannot_have_it_is_refused_with_the_remedy(config: EngineConfig) -> None:
    with pytest.raises(UnsupportedError, match=r"lacks dtype float32.*prompt_attention paged"):
        build_core(replace(config, dtype="float32"))
    with pytest.raises(UnsupportedError, match="lacks pages in 8 bits"):
        build_core(replace(config, kv_cache_dtype="int8"))
    with pytest.raises(UnsupportedError, match="windows and sinks"):
        build_core(replace(config, streaming=True))
    with pytest.raises(UnsupportedError, match="this engine has 'xla': leave it out"):
        build_core(replace(config, implementation="xla"))
    with pytest.raises(InvalidRequestError, match="deterministic and prompt_attention cudnn"):
        build_core(replace(config, deterministic=True))
