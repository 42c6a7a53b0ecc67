"""Endless text: whether pages, time and memory stay what they are, and what sessions save.

Tokens in, tokens out, ends of sequence ignored. Steps the engine's core itself, so that every token
is seen when it comes. Called by `swiftjax bench streaming`.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from swiftjax.api import Engine
from swiftjax.bench.records import Figure
from swiftjax.engine.request import GenerationConfig, Request
from swiftjax.engine.streaming import Streaming
from swiftjax.sessions import Session

NUM_SAMPLES = 200  # points of the curves that a record keeps
ROUNDS = 3


class Turns(NamedTuple):
    """A chat of `count` turns: so many tokens are asked, and so many answered, in each."""

    answer: int
    question: int = 80
    count: int = 5


def measure_endless(
    engine: Engine,
    streaming: Streaming,
    num_tokens: int,
    progress: Callable[[int, int], None] | None = None,
) -> Figure:
    """Generate without end: milliseconds a token, pages in use and resident memory on the way.

    `spread` holds the fastest and the slowest of the samples after the window is full; `progress`
    is told (tokens so far, tokens in all) with each sample.
    """
    core = engine.built.core
    config = GenerationConfig(
        max_new_tokens=num_tokens, ignore_eos=True, streaming=streaming, temperature=1.0, seed=0
    )
    core.submit(_request(engine, [1], config))
    every = max(1, num_tokens // NUM_SAMPLES)
    count, last = 0, time.perf_counter()
    places: list[int] = []
    times, pages, memory = [], [], []
    while core.has_work:
        count += sum(len(output.token_ids) for output in core.step())
        if count < (len(places) + 1) * every:
            continue
        now, stats = time.perf_counter(), core.stats()
        places.append(count)
        times.append((now - last) * 1e3 / every)
        pages.append(stats.num_pages - stats.num_free_pages)
        memory.append(resident_mib())
        if progress is not None:
            progress(count, num_tokens)
        last = time.perf_counter()
    full = [i for i, place in enumerate(places) if place > 1.1 * streaming.shared_len()][:-1]
    steady = [times[i] for i in full]
    return Figure(
        workload="endless", batch=1, context=num_tokens, unit="ms/token",
        value=statistics.median(steady), spread=(min(steady), max(steady)),
        details={
            "sink": streaming.sink, "window": streaming.window, "page_size": core.stats().page_size,
            "pages": sorted({pages[i] for i in full}), "tokens_at": places,
            "ms_at": [round(x, 4) for x in times], "pages_at": pages,
            "rss_mib_at": [round(x, 1) for x in memory],
        },
    )  # fmt: skip


def measure_position(
    engine: Engine, streaming: Streaming, positions: Sequence[int], num_tokens: int
) -> Iterator[Figure]:
    """Milliseconds from token to token behind prompts of these lengths, computed in chunks.

    Rounds are taken at one position after the other, so that all see the same clocks.
    """
    config = GenerationConfig(max_new_tokens=1, ignore_eos=True)
    sessions = []
    for position in positions:
        session = engine.open_session(streaming=streaming, seed=0)
        session.append(_random_ids(engine, position))
        start = time.perf_counter()
        session.generate(config)
        sessions.append((session, time.perf_counter() - start))
    rounds: list[list[float]] = [[] for _ in positions]
    for _ in range(ROUNDS):
        for times, (session, _) in zip(rounds, sessions, strict=True):
            taken = session.generate(replace(config, max_new_tokens=num_tokens + 1)).timings
            times.append((taken.total - (taken.first_token or 0.0)) / num_tokens * 1e3)
    first = statistics.median(rounds[0])
    for position, times, (session, prefill) in zip(positions, rounds, sessions, strict=True):
        session.close()
        value = statistics.median(times)
        yield Figure(
            workload="position", batch=1, context=position, unit="ms/token", value=value,
            spread=(min(times), max(times)),
            details={
                "sink": streaming.sink, "window": streaming.window, "tokens": num_tokens,
                "prefill_s": round(prefill, 2), "over_first": round(value / first, 4),
            },
        )  # fmt: skip


def measure_turns(engine: Engine, streaming: Streaming, turns: Turns) -> Iterator[Figure]:
    """Seconds a turn of a chat that has filled its window long ago, three ways.

    With a session; with the window computed again in every turn; and, as the paper's baseline does,
    for every token (by the time of a few, times the length of an answer).
    """
    history, window = _random_ids(engine, 2 * streaming.shared_len()), streaming.shared_len()
    kept, again = [], []
    session = engine.open_session(streaming=streaming, seed=0)
    session.append(history)
    _turn_seconds(session, 1)
    for turn in range(turns.count):
        question = _random_ids(engine, turns.question, turn)
        start = time.perf_counter()
        session.append(question)
        _turn_seconds(session, turns.answer)
        kept.append(time.perf_counter() - start)
        prompt = list(session.token_ids[-turns.answer - window : -turns.answer])
        again.append(_plain_seconds(engine, prompt, turns.answer))
    session.close()
    each = [_plain_seconds(engine, history[-window:], 1) * turns.answer for _ in range(ROUNDS)]
    details = {
        "sink": streaming.sink, "window": streaming.window, "question": turns.question,
        "turns": turns.count,
    }  # fmt: skip
    value = statistics.median(kept)
    for name, times in (("turn", kept), ("turn, window again", again), ("turn, each token", each)):
        took = statistics.median(times)
        yield Figure(
            workload=name, batch=1, context=turns.answer, unit="s", value=took,
            spread=(min(times), max(times)), details=details | {"speed_up": round(took / value, 3)},
        )  # fmt: skip


def resident_mib() -> float:
    """Memory of this process that is in RAM."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _turn_seconds(session: Session, num_tokens: int) -> float:
    config = GenerationConfig(max_new_tokens=num_tokens, ignore_eos=True)
    start = time.perf_counter()
    assert len(session.generate(config).token_ids) == num_tokens
    return time.perf_counter() - start


def _plain_seconds(engine: Engine, prompt: list[int], num_tokens: int) -> float:
    config = GenerationConfig(max_new_tokens=num_tokens, ignore_eos=True)
    start = time.perf_counter()
    [answer] = engine.generate([prompt], config)
    assert len(answer.token_ids) == num_tokens
    return time.perf_counter() - start


def _request(engine: Engine, prompt: list[int], config: GenerationConfig) -> Request:
    limits = engine.built.core.limits._replace(eos_token_ids=())
    return limits.resolve("endless", prompt, config, fresh_seed=0, arrival_time=time.monotonic())


def _random_ids(engine: Engine, count: int, seed: int = 0) -> list[int]:
    vocab_size = engine.built.model_config.vocab_size
    return np.random.default_rng(seed).integers(0, vocab_size, count).tolist()
