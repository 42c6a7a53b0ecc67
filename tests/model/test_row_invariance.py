"""Which models have rows whose bits depend on nothing else, and what steps deterministic mode has.

That their bits are equal is shown on a GPU by `test_deterministic.py`.
"""

import dataclasses

import pytest

from swiftjax.build_scheduler import choose_buckets
from swiftjax.config import EngineConfig
from swiftjax.converters.quantize import with_quantization
from swiftjax.model.row_invariance import knows_invariant_rows
from swiftjax.quantization import Quantization
from swiftjax.shapes import SHAPES
from swiftjax.sizing import Sizes


@pytest.mark.parametrize("name", ["llama3-1b", "llama3-8b"])
def test_models_with_invariant_rows(name: str) -> None:
    model = SHAPES[name]
    assert knows_invariant_rows(model, "mosaic")
    assert not knows_invariant_rows(model, "triton")
    assert not knows_invariant_rows(with_quantization(model, Quantization(kind="fp8")), "mosaic")
    assert not knows_invariant_rows(dataclasses.replace(model, dtype="float32"), "mosaic")
    assert not knows_invariant_rows(dataclasses.replace(model, vocab_size=32001), "mosaic")


def test_deterministic_steps_have_one_size_or_several() -> None:
    sizes = Sizes(max_model_len=1024, page_size=64, max_num_seqs=256, max_num_batched_tokens=2048)
    config = EngineConfig(model_path="llama3-8b", deterministic=True)
    single = choose_buckets(sizes, config)
    assert [shape.num_tokens for shape in single.all] == [2048]
    several = choose_buckets(sizes, config, is_invariant=True)
    assert [shape.num_tokens for shape in several.all] == [128, 256, 512, 768, 1024, 1536, 2048]
    assert {shape.num_seqs for shape in several.mixed} == {256}
    assert not any(shape.long_chunks for shape in several.all)
    many = choose_buckets(dataclasses.replace(sizes, max_num_seqs=600), config, is_invariant=True)
    assert [shape.num_seqs for shape in many.decode] == [128, 256, 512, 600]
    few = choose_buckets(dataclasses.replace(sizes, max_num_seqs=3), config, is_invariant=True)
    assert [shape.num_seqs for shape in few.decode] == [3]
    # Prompts are scored from hidden states, which decode steps do not give.
    assert several.choose(256, 256, scores_prompt=True).num_tokens == 512
