"""Other weights in a built engine: the same programs, the other checkpoint's answers."""

import json
from pathlib import Path
from typing import Any

import pytest

from swiftjax.api import Engine
from swiftjax.build import BuiltCore, build_core
from swiftjax.config import EngineConfig
from swiftjax.engine.request import GenerationConfig
from swiftjax.errors import CheckpointError, InvalidRequestError
from swiftjax.weight_swap import WeightSwap
from tests.compiles import no_compiles
from tests.tiny_checkpoints import tiny_config, tiny_tensors, write_checkpoint

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6] * 3
CONFIG = GenerationConfig(max_new_tokens=12, ignore_eos=True, logprobs=0)


def config_of(path: Path) -> EngineConfig:
    return EngineConfig(
        model_path=str(path), max_batch_size=2, max_num_batched_tokens=32, max_model_len=64,
        max_total_token_num=256, page_size=4, swap_space_gib=0.0,
    )  # fmt: skip


def answer(engine: Engine) -> tuple[tuple[int, ...], tuple[float, ...], int]:
    [output] = engine.generate(input_ids=[PROMPT], generation_config=CONFIG)
    return output.token_ids, output.logprobs, output.num_cached_tokens


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[BuiltCore, EngineConfig, Path]:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("first", "second")):
        write_checkpoint(folder / name, tiny_config(), tiny_tensors(tiny_config(), seed))
    config = config_of(folder / "first")
    core = build_core(config)
    return core, config, folder


def test_the_other_weights_answer_and_nothing_is_compiled(
    built: tuple[BuiltCore, EngineConfig, Path],
) -> None:
    core, config, folder = built
    engine, swap = Engine.from_core(core), WeightSwap(config, core)
    first = answer(engine)
    assert answer(engine)[2] > 0  # from the cache
    wanted = answer(Engine.from_core(build_core(config_of(folder / "second"))))
    assert wanted[0] != first[0]
    name = core.runner.fingerprint()
    with no_compiles():
        swap.read(str(folder / "second"))
        assert answer(engine)[:2] == first[:2]  # read, and not used yet
        swap.use()
        core.core.forget_pages()
        assert answer(engine) == wanted  # nothing was taken from the other's cache either
        swap.read(str(folder / "second"))
        swap.forget()
        with pytest.raises(AssertionError, match="nothing was read"):
            swap.use()
        swap.read(config.model_path)
        swap.use()
        core.core.forget_pages()
        assert answer(engine) == first
    assert core.runner.fingerprint() == name


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"intermediate_size": 64}, r"tensor layers\.0\.mlp\.\S+ of other is float32\["),
        ({"num_hidden_layers": 3}, r"other has an additional tensor layers\.2\."),
        ({"tie_word_embeddings": True}, r"other has no tensor head\.kernel"),
        ({"rope_theta": 5e5}, r"rope of other is .*500000"),
        ({"eos_token_id": 257}, r"eos_token_ids of other is \(257,\)"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    built: tuple[BuiltCore, EngineConfig, Path],
    tmp_path: Path,
    changes: dict[str, Any],
    named: str,
) -> None:
    core, config, _ = built
    engine, swap = Engine.from_core(core), WeightSwap(config, core)
    before = answer(engine)[:2]
    write_checkpoint(tmp_path / "other", tiny_config(**changes))
    with pytest.raises(InvalidRequestError, match=f"{named}.*start another server"):
        swap.read(str(tmp_path / "other"))
    assert answer(engine)[:2] == before


def test_another_tokenizer_and_a_broken_file_are_refused(
    built: tuple[BuiltCore, EngineConfig, Path], tmp_path: Path
) -> None:
    core, config, _ = built
    swap = WeightSwap(config, core)
    other = tmp_path / "other"
    write_checkpoint(other, tiny_config())
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["added_tokens"][0]["special"] = False
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InvalidRequestError, match="another tokenizer"):
        swap.read(str(other))
    with pytest.raises(CheckpointError, match="nowhere"):
        swap.read(str(tmp_path / "nowhere"))
