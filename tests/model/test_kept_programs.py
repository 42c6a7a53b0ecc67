"""Programs kept on disk: the same as compiled ones, and never a wrong or a foreign one."""

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from swiftjax.batch import Batch, BatchShape, empty_batch
from swiftjax.model.assembly import make_programs, make_state
from swiftjax.model.kept_programs import KeptPrograms, Program
from swiftjax.model.programs import Programs, Sampler
from swiftjax.model.runner import ModelRunner
from tests.compiles import no_compiles
from tests.tiny import TINY, tiny_params

MIXED = BatchShape(num_tokens=16, num_seqs=4, max_pages=4)
DECODE = BatchShape(num_tokens=4, num_seqs=4, max_pages=4)


ONE_LAYER = dataclasses.replace(TINY, num_layers=1, vocab_size=64)
SIZES: dict[str, Any] = {"max_num_seqs": 5, "num_pages": 8, "page_size": 4}
FIELDS: dict[Sampler, tuple[str, ...]] = {"greedy": (), "full": ("temperature", "num_logprobs")}


def make_kept_runner(kept: KeptPrograms | None) -> ModelRunner:
    programs = make_programs(
        ONE_LAYER, **SIZES, max_model_len=64, implementation="xla", kept=kept
    )  # fmt: skip
    params = programs.model.bind(tiny_params(ONE_LAYER))
    runner = ModelRunner(programs, params, partial(make_state, ONE_LAYER, **SIZES))
    runner.allocate()
    return runner


def get_all(programs: Programs) -> None:
    """One of each kind."""
    for shape in (MIXED, DECODE):
        programs.forward(shape)
    for kind in FIELDS:
        programs.sampler(4, kind)
    programs.scorer(16)


def batch_of(shape: BatchShape, kind: Sampler) -> Batch:
    batch = empty_batch(shape, 32)
    batch.token_ids[0], batch.context_lens[0], batch.slot_mapping[0] = 5, 1, 0
    for name in FIELDS[kind]:
        getattr(batch.sampling, name)[0] = 1
    if shape == MIXED:
        batch.target_ids[0] = 3
    return batch


def refuse_to_trace(*_: Any, **__: Any) -> None:
    raise AssertionError("traced although it was kept")


@pytest.fixture(scope="module", autouse=True)
def empty_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What XLA's cache has is not kept."""
    before = jax.config.values["jax_compilation_cache_dir"]
    set_cache(str(tmp_path_factory.mktemp("compiled")))
    yield
    set_cache(before)


def set_cache(path: str | None) -> None:
    reset_cache()
    jax.config.update("jax_compilation_cache_dir", path)
    jax.clear_caches()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs")
    get_all(make_kept_runner(KeptPrograms(path, "here"))._programs)
    return path


def test_the_next_start_neither_traces_nor_compiles(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, loaded = make_kept_runner(None), make_kept_runner(KeptPrograms(folder, "here"))
    with monkeypatch.context() as patch, no_compiles():
        patch.setattr(Program, "lower", refuse_to_trace)
        get_all(loaded._programs)
    assert loaded.num_compiles == len(list(folder.iterdir())) == 5
    for shape in (MIXED, DECODE):
        for kind in FIELDS:
            steps = (runner.dispatch(batch_of(shape, kind)).wait(4) for runner in (plain, loaded))
            want, got = map(repr, steps)
            assert got == want
    for want, got in zip(*(jax.tree.leaves(r._state) for r in (plain, loaded)), strict=True):
        assert np.asarray(want).tobytes() == np.asarray(got).tobytes()


def test_a_loaded_step_writes_in_place(folder: Path) -> None:
    runner = make_kept_runner(KeptPrograms(folder, "here"))
    before = runner._state
    places = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(before.kv_cache)]
    runner.dispatch(batch_of(DECODE, "full")).wait(4)
    assert all(x.is_deleted() for x in jax.tree.leaves(before))
    after = jax.tree.leaves(runner._state.kv_cache)
    assert [x.unsafe_buffer_pointer() for x in after] == places
    places = [x.unsafe_buffer_pointer() for x in runner._old_logits[4]]
    runner.dispatch(batch_of(DECODE, "full")).wait(4)
    assert [x.unsafe_buffer_pointer() for x in runner._old_logits[4]] == places


_factors = count(2)


def make_program() -> tuple[Program, list[float]]:
    """One that was never compiled before, and its result for ones."""
    factor = next(_factors)
    arguments = (jax.ShapeDtypeStruct((3,), jnp.float32),)
    return Program(step=lambda x: x * factor, arguments=arguments, result=0), [factor] * 3


FOUR = (jax.ShapeDtypeStruct((4,), jnp.float32),)
HALVES = (jax.ShapeDtypeStruct((3,), jnp.float16),)
OTHERS: list[tuple[str, str, dict[str, Any]]] = [
    ("there", "step", {}),
    ("here", "other", {}),
    ("here", "step", {"arguments": FOUR}),
    ("here", "step", {"arguments": HALVES}),
    ("here", "step", {"donated": (0,)}),
    ("here", "step", {"options": {"xla_cpu_enable_fast_math": False}}),
    ("here", "step", {"result": (0,)}),
]


def test_anything_else_is_another_program(tmp_path: Path) -> None:
    program, _ = make_program()
    keys = {KeptPrograms(tmp_path, "here")._key("step", program)}
    for around, described, changes in OTHERS:
        other = dataclasses.replace(program, **changes)
        keys.add(KeptPrograms(tmp_path, around)._key(described, other))
    with jax.default_matmul_precision("highest"):  # changed after the folder was opened
        keys.add(KeptPrograms(tmp_path, "here")._key("step", program))
    assert len(keys) == 2 + len(OTHERS)


def test_what_was_loaded_is_not_kept_again(tmp_path: Path) -> None:
    """It lost its code: XLA writes it, loads it and fails when it is run."""
    program, want = make_program()
    program.compile()
    jax.clear_caches()
    assert KeptPrograms(tmp_path, "here").get("step", program)(jnp.ones(3)).tolist() == want
    assert not list(tmp_path.iterdir())


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """Every program that was not loaded."""
    found, compile_ = [], Program.compile
    monkeypatch.setattr(Program, "compile", lambda self: (found.append(self), compile_(self))[1])
    return found


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)


def link(path: Path) -> None:
    target = path.with_name("target")
    path.rename(target)
    path.symlink_to(target)


@pytest.mark.parametrize(
    "spoil",
    [cut, flip, link, lambda p: p.write_bytes(b""), lambda p: p.chmod(0o620),
     lambda p: p.chmod(0o602), lambda p: (p.unlink(), p.mkdir())],
)  # fmt: skip
def test_a_spoilt_file_is_compiled_again(
    tmp_path: Path,
    spoil: Callable[[Path], object],
    caplog: pytest.LogCaptureFixture,
    compiled: list[Program],
) -> None:
    kept, (program, want) = KeptPrograms(tmp_path, "here"), make_program()
    kept.get("step", program)
    (path,) = tmp_path.iterdir()
    spoil(path)
    assert kept.get("step", program)(jnp.ones(3)).tolist() == want
    assert len(compiled) == 2
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_a_file_of_another_program_is_not_taken(tmp_path: Path) -> None:
    kept = KeptPrograms(tmp_path, "here")
    (program, _), (other, want) = make_program(), make_program()
    kept.get("one", program)
    (one,) = tmp_path.iterdir()
    kept.get("other", other)
    (path,) = set(tmp_path.iterdir()) - {one}
    one.replace(path)
    assert kept.get("other", other)(jnp.ones(3)).tolist() == want


def test_the_longest_unused_go_first(tmp_path: Path, compiled: list[Program]) -> None:
    kept, programs = KeptPrograms(tmp_path, "here"), {name: make_program()[0] for name in "abc"}
    kept.get("a", programs["a"])
    kept.get("b", programs["b"])
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    kept.get("a", programs["a"])  # used again
    KeptPrograms(tmp_path, "here", max_bytes=int(2.5 * max(sizes))).get("c", programs["c"])
    assert len(list(tmp_path.iterdir())) == 2
    for name, count_ in (("a", 3), ("c", 3), ("b", 4)):
        kept.get(name, programs[name])
        assert len(compiled) == count_


def test_a_full_disk_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    kept, (program, want) = KeptPrograms(tmp_path / "gone", "here"), make_program()
    (tmp_path / "gone").rmdir()
    assert kept.get("step", program)(jnp.ones(3)).tolist() == want


def test_what_cannot_be_written_down_runs_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(compiled: Any) -> Any:
        raise TypeError("cannot pickle 'module' object")

    monkeypatch.setattr("swiftjax.model.kept_programs.serialize", fails)
    program, want = make_program()
    assert KeptPrograms(tmp_path, "here").get("step", program)(jnp.ones(3)).tolist() == want
    assert not list(tmp_path.iterdir())
