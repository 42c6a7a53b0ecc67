"""Sessions of the blocking engine over a tiny model: turns go on exactly, wherever pages went."""

import errno
import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from swiftjax import Engine, EngineConfig, GenerationConfig, Session, Streaming
from swiftjax.build import build_core
from swiftjax.config import KVCacheDtype, SessionLimits
from swiftjax.engine.session_file import SavedSession, read_session, write_session
from swiftjax.errors import InvalidRequestError
from swiftjax.model import page_copies
from tests.tiny_checkpoints import tiny_config, tiny_tensors, write_checkpoint

STREAMING = Streaming(sink=4, window=40)
TEN = GenerationConfig(max_new_tokens=10, ignore_eos=True, temperature=1.0)
MANY = replace(TEN, max_new_tokens=90)
SIZES: dict[str, Any] = {
    "max_batch_size": 2, "max_num_batched_tokens": 64, "max_model_len": 160, "page_size": 4,
    "max_total_token_num": 512,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", tiny_config())


def build(checkpoint: Path, kv_cache_dtype: KVCacheDtype = "auto", **limits: Any) -> Engine:
    sessions = SessionLimits(**limits)
    config = EngineConfig(
        model_path=str(checkpoint), streaming=True, sessions=sessions, prefix_cache=False,
        overlap=True, kv_cache_dtype=kv_cache_dtype, **SIZES,
    )  # fmt: skip
    return Engine.from_core(build_core(config))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def engine(checkpoint: Path, folder: Path) -> Engine:
    engine = build(checkpoint, device_share=0.2, folder=str(folder))
    engine.built.runner.copies._host_bytes = 40 * engine.built.memory.page_bytes
    return engine


def in_turns(session: Session, *counts: int) -> list[int]:
    """The tokens of several turns with nothing appended between them."""
    answers = [session.generate(replace(MANY, max_new_tokens=count)) for count in counts]
    return [token for answer in answers for token in answer.token_ids]


@pytest.mark.parametrize("streaming", [None, STREAMING], ids=["plain", "streaming"])
def test_turns_are_what_one_answer_would_be(engine: Engine, streaming: Streaming | None) -> None:
    with engine.open_session(streaming=streaming, seed=3) as session:
        session.append("Once upon")
        tokens = in_turns(session, 30, 1, 59)
        assert session.token_ids[-90:] == tuple(tokens) and len(session) == 99
    config = replace(MANY, seed=3, streaming=streaming)
    [want] = engine.generate(["Once upon"], config)
    assert tokens == list(want.token_ids)
    assert engine.built.core.stats().num_free_pages == 128


def test_only_what_is_new_is_computed(engine: Engine) -> None:
    with engine.open_session(streaming=STREAMING) as session:
        session.append("A long beginning. " * 9)
        session.generate(MANY)
        length = len(session)
        session.append(" More.")
        answer = session.generate(TEN)
        # The last token of an answer was never fed back.
        assert answer.num_cached_tokens == length - 1
        assert session.token_ids[:length] == answer.prompt_token_ids[:length]
        prompt = list(answer.prompt_token_ids)
        config = replace(TEN, seed=session._text.seed, streaming=STREAMING)
        assert engine.generate([prompt], config)[0].token_ids == answer.token_ids


def test_a_fork_goes_its_own_way_from_shared_pages(engine: Engine) -> None:
    with engine.open_session(streaming=STREAMING, seed=5) as session:
        session.append("Once upon a time")
        in_turns(session, 50)
        fork = session.fork()
        fork.append("?")
        answer = fork.generate(TEN)
        assert answer.num_cached_tokens == len(session) - 1
        prompt = list(fork.token_ids[:-10])
        [want] = engine.generate([prompt], replace(TEN, seed=5, streaming=STREAMING))
        assert answer.token_ids == want.token_ids
        fork.close()
        rest = in_turns(session, 20)
        [whole] = engine.generate(
            ["Once upon a time"],
            replace(MANY, seed=5, max_new_tokens=70, streaming=STREAMING),
        )
        assert list(whole.token_ids[50:]) == rest
    engine.built.core.scheduler.check_integrity()


def test_a_stop_string_ends_a_turn_and_the_text_with_it(engine: Engine) -> None:
    with engine.open_session(streaming=STREAMING, seed=1) as session:
        session.append("Once upon a time")
        start = len(session)
        with session.fork() as fork:
            free = fork.generate(MANY)
        stop = engine.tokenizer.decode(free.token_ids[40:42])
        answer = session.generate(replace(MANY, stop=stop))
        assert answer.finish_reason == "stop" and len(answer.token_ids) < 50
        assert session.token_ids[start:] == answer.token_ids
        more = session.generate(TEN)
        assert more.num_cached_tokens >= len(more.prompt_token_ids) - 2
        first = len(answer.token_ids)
        assert more.token_ids == free.token_ids[first : first + 10]


def test_pages_leave_for_the_host_and_for_disk_and_come_back(engine: Engine, folder: Path) -> None:
    sessions = [engine.open_session(streaming=STREAMING, seed=i) for i in range(6)]
    for session in sessions:
        session.append("Once upon a time")
    tokens = [in_turns(session, 60) for session in sessions]
    [engine.generate(["x" * 150], TEN) for _ in range(2)]
    kept = engine.built.core.scheduler.kept
    assert engine.built.runner.copies.num_on_disk and kept.num_stored
    assert not list(folder.iterdir())  # files without names can't be left behind
    for i, session in enumerate(sessions):
        length = len(session)
        answer = session.generate(TEN)
        assert answer.num_cached_tokens == length - 1
        config = replace(MANY, max_new_tokens=70, seed=i, streaming=STREAMING)
        [want] = engine.generate(["Once upon a time"], config)
        assert list(want.token_ids) == [*tokens[i], *answer.token_ids]
        engine.built.core.scheduler.check_integrity()
    for session in sessions:
        session.close()
    engine.generate(["x"], TEN)
    assert engine.built.core.stats().num_free_pages == 128
    assert not engine.built.runner.copies.num_on_disk


def test_lost_files_of_pages_are_computed_again(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine goes on, and so does the session, at the cost of its text."""
    engine = build(checkpoint, device_share=0.0, host_gib=0.0, folder=str(tmp_path))
    copies = engine.built.runner.copies
    copies._host_bytes = 0

    def refuse(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    config = replace(MANY, max_new_tokens=60, seed=4, streaming=STREAMING)
    want = list(engine.generate(["Once upon a time"], config)[0].token_ids)
    for what in ("cut", "unreadable", "full disk"):
        if what == "full disk":
            monkeypatch.setattr(page_copies, "_open", refuse)
        with engine.open_session(streaming=STREAMING, seed=4) as session:
            session.append("Once upon a time")
            tokens = in_turns(session, 50)
            engine.generate(["x"], TEN)  # whose steps carry the pages out
            [copy] = copies._on_disk.values()
            assert copy.written is not None and not list(tmp_path.iterdir())
            copy.written.result()
            if copy._file is not None:
                copy._file.truncate(100)
            if what == "unreadable":
                copy._file = cast(Any, open(os.devnull, "ab"))  # noqa: SIM115
            file = tmp_path / "talk"
            session.save(file)  # without pages, which is no less of a session
            assert not copies._fetched
            answer = session.generate(TEN)
            assert answer.num_cached_tokens == 0 and want == [*tokens, *answer.token_ids]
            with engine.restore_session(file) as restored:
                assert restored.generate(TEN).token_ids == answer.token_ids
            file.unlink()


def test_a_session_survives_preemption(engine: Engine) -> None:
    [want] = engine.generate(["Once"], replace(MANY, seed=2, streaming=STREAMING))
    core, steps = engine.built.core, 0
    plain = core.step

    def step() -> list:
        nonlocal steps
        steps += 1
        if steps % 7 == 0:
            core.scheduler.preemption.preempt_next()
        return plain()

    with engine.open_session(streaming=STREAMING, seed=2) as session:
        session.append("Once")
        beside = engine.add_request("Beside it", replace(MANY, max_new_tokens=120))
        before = core.scheduler.num_preemptions
        core.step = step  # type: ignore[method-assign]
        try:
            tokens = in_turns(session, 40, 50)
        finally:
            core.step = plain  # type: ignore[method-assign]
        assert core.scheduler.num_preemptions > before + 3
        assert tokens == list(want.token_ids)
    while not engine.is_request_finished(beside):
        engine.step()
    engine.get_completed_requests()


def test_a_cache_in_eight_bits_keeps_and_saves_sessions_too(
    checkpoint: Path, tmp_path: Path
) -> None:
    engine = build(checkpoint, "int8")
    session = engine.open_session(streaming=STREAMING, seed=3)
    session.append("Once upon")
    tokens = in_turns(session, 50)
    session.save(tmp_path / "talk")
    tokens += in_turns(session, 40)
    config = replace(MANY, seed=3, streaming=STREAMING)
    assert tokens == list(engine.generate(["Once upon"], config)[0].token_ids)
    restored = engine.restore_session(tmp_path / "talk")
    assert in_turns(restored, 40) == tokens[50:]


OTHER_PROCESS = """
import sys
from dataclasses import replace
from pathlib import Path
from tests.model.test_sessions import TEN, build
session = build(Path(sys.argv[1])).restore_session(sys.argv[2])
length = len(session)
answer = session.generate(replace(TEN, max_new_tokens=40))
assert answer.num_cached_tokens == length - 1
print(*answer.token_ids)
"""


def test_another_process_goes_on_from_a_file(
    engine: Engine, checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "talk.session"
    session = engine.open_session(streaming=STREAMING)
    session.append("Once upon a time")
    in_turns(session, 70)
    session.save(file)
    want = in_turns(session, 40)
    session.close()
    command = [sys.executable, "-c", OTHER_PROCESS, str(checkpoint), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [int(token) for token in done.stdout.split()] == want
    assert file.stat().st_mode & 0o077 == 0
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def file_of(data: bytes, path: Path) -> Path:
    path.write_bytes(data)
    return path


def test_what_was_altered_or_is_another_models_is_refused(
    engine: Engine, checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "talk.session"
    with engine.open_session(streaming=STREAMING) as session:
        session.append("Once")
        in_turns(session, 20)
        session.save(file)
    whole = file.read_bytes()
    for place in (0, 30, len(whole) // 2, len(whole) - 1):
        changed = bytearray(whole)
        changed[place] ^= 1
        file.write_bytes(changed)
        with pytest.raises(InvalidRequestError, match=r"talk\.session.*(hash|no session)"):
            engine.restore_session(file)
    file.write_bytes(whole[:-7])
    with pytest.raises(InvalidRequestError, match="altered or cut"):
        engine.restore_session(file)
    *first, last = read_session(file_of(whole, file)).pages.chunks
    for chunks in ((*first, last[:, :-1]), (*first, last[:-1]), first):
        saved = read_session(file)
        pages = saved.pages._replace(chunks=tuple(chunks))
        write_session(file, saved._replace(pages=pages))
        with pytest.raises(InvalidRequestError, match=r"talk\.session: .* do not fit"):
            engine.restore_session(file)
        file_of(whole, file)
    config = tiny_config()
    other = write_checkpoint(tmp_path / "other", config, tiny_tensors(config, 1))
    with pytest.raises(InvalidRequestError, match=r"talk\.session.*another model"):
        build(other).restore_session(file)
    larger = Engine(
        str(checkpoint), max_batch_size=1, max_model_len=64, page_size=8, streaming=True
    )
    with pytest.raises(InvalidRequestError, match="page_size 4"):
        larger.restore_session(file)
    plain = Engine(str(checkpoint), max_batch_size=1, max_model_len=64, page_size=4)
    with pytest.raises(InvalidRequestError, match="not started for streaming"):
        plain.restore_session(file)
    assert not plain.built.core.scheduler.kept.num_stored
    with pytest.raises(InvalidRequestError, match="cannot read"):
        engine.restore_session(tmp_path / "none")
    with pytest.raises(InvalidRequestError, match="cannot write"), engine.open_session() as session:
        session.save(tmp_path / "no" / "folder")


def test_what_was_forged_with_a_right_hash_is_refused(engine: Engine, tmp_path: Path) -> None:
    """Before anything of the size it claims is made."""
    file = tmp_path / "talk.session"
    with engine.open_session(streaming=STREAMING) as session:
        session.append("Once")
        session.generate(TEN)
        session.save(file)
    saved = read_session(file)
    forged: list[tuple[dict[str, Any], Any]] = [
        ({"num_pages": 10**13}, 1),
        ({"num_pages": -5, "num_dropped": 6, "chunks": ()}, 1),
        ({"known": 10**30}, 1),
        ({}, 10**30),
        ({}, "nothing"),
    ]
    for pages, seed in forged:
        state = saved.state._replace(seed=seed)
        write_session(file, SavedSession(state, saved.pages._replace(**pages)))
        with pytest.raises(InvalidRequestError, match=r"talk\.session.*(cannot be|no sense)"):
            engine.restore_session(file)
    deep = b"[" * 100_000 + b"]" * 100_000
    body = b"SwiftJAX session 1\n" + len(deep).to_bytes(8, "little") + deep
    file.write_bytes(body + hashlib.sha256(body).digest())
    with pytest.raises(InvalidRequestError, match="makes no sense"):
        engine.restore_session(file)


def test_what_a_session_cannot_do_is_refused_with_a_remedy(engine: Engine) -> None:
    session = engine.open_session()
    with pytest.raises(InvalidRequestError, match="append something first"):
        session.generate()
    session.append([5, 6])
    for config in (replace(TEN, n=2), replace(TEN, prompt_logprobs=0)):
        with pytest.raises(InvalidRequestError, match="does not go with"):
            session.generate(config)
    with pytest.raises(InvalidRequestError, match="from its start"):
        session.generate(replace(TEN, streaming=STREAMING))
    with pytest.raises(InvalidRequestError, match="open a session with streaming"):
        session.append([5] * 158)
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        session.append([5, 100_000])
    assert session.token_ids == (5, 6)
    session.close()
    with pytest.raises(InvalidRequestError, match="is closed"):
        session.append("x")


def test_messages_are_appended_as_the_template_goes_on(engine: Engine) -> None:
    with engine.open_session() as session:
        session.append([{"role": "user", "content": "hi"}])
        assert engine.tokenizer.decode(session.token_ids, False) == "<s>user: hi\n<s>assistant: "
        session.append("Yes?")
        session.append([{"role": "user", "content": "so"}])
        text = engine.tokenizer.decode(session.token_ids, False)
        assert text == "<s>user: hi\n<s>assistant: Yes?\n<s>user: so\n<s>assistant: "
