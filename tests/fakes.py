"""A data plane that can be computed by hand: the next token is the last one plus one, modulo V."""

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swiftjax.batch import NONE, Batch, PageMoves, Sampled
from swiftjax.config import SchedulerConfig
from swiftjax.engine.buckets import make_buckets
from swiftjax.engine.core import EngineCore
from swiftjax.engine.kept_pages import NOTHING_KEPT, KeptLimits
from swiftjax.engine.limits import EngineLimits
from swiftjax.engine.page_pool import PagePool
from swiftjax.engine.preemption import PreemptionCosts
from swiftjax.engine.request import GenerationConfig, Request, RequestOptions
from swiftjax.engine.rows import RowTable
from swiftjax.engine.scheduler import Scheduler
from swiftjax.engine.streaming import Streaming
from swiftjax.engine.tracer import Tracer


class FakePending:
    """Tokens that were ready from the start."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

    def wait(self, num_rows: int) -> Sampled:
        """The first rows, each with log-probability -0.5."""
        return Sampled(self._token_ids[:num_rows], [-0.5] * num_rows)


class FakeRunner:
    """Answers every row with (last token + 1) mod V and remembers what it was asked."""

    def __init__(self, vocab_size: int, delay: float = 0.0) -> None:
        self.vocab_size = vocab_size
        self.delay = delay  # seconds a step takes
        self.stride = 1  # what is added to a token: the "weights"
        self.batches: list[Batch] = []
        self.swapped: set[str] = set()
        self.last_tokens: dict[int, int] = {}  # by row, as on the device

    def move(self, moves: PageMoves) -> None:
        """Pages on the host are remembered by name."""
        for move in moves.out:
            self.swapped.add(move.key)
        assert self.swapped >= {move.key for move in moves.back}
        for name in moves.drop:
            self.swapped.remove(name)

    def fetch_copy(self, key: str) -> bool:
        """Whether nobody has lost it."""
        return True

    def read_copy(self, key: str, num_pages: int) -> list[np.ndarray]:
        """Pages without contents."""
        assert key in self.swapped
        return [np.zeros(num_pages, np.int64)]

    def load_copy(self, key: str, num_pages: int, chunks: Sequence[np.ndarray]) -> None:
        """Remember a name."""
        self.swapped.add(key)

    def fingerprint(self) -> str:
        """Of a model that counts."""
        return f"counts to {self.vocab_size}"

    def dispatch(self, batch: Batch, moves: PageMoves) -> FakePending:
        """Move, then compute at once."""
        self.move(moves)
        self.batches.append(batch)
        time.sleep(self.delay)
        return FakePending(self._keep(batch, self._sample(batch, self._token_ids(batch))))

    def _sample(self, batch: Batch, token_ids: np.ndarray) -> list[int]:
        return [int(t) for t in (token_ids[batch.sample_rows] + self.stride) % self.vocab_size]

    def _token_ids(self, batch: Batch) -> np.ndarray:
        """The batch's tokens, those that the host has not read yet included."""
        token_ids = batch.token_ids.copy()
        for i in np.flatnonzero(batch.token_sources != NONE):
            token_ids[i] = self.last_tokens[batch.token_sources[i]]
        return token_ids

    def _keep(self, batch: Batch, tokens: list[int]) -> list[int]:
        self.last_tokens |= dict(zip(batch.sampling.token_rows.tolist(), tokens, strict=True))
        return tokens

    def load_counts(self, row: int, counts: np.ndarray) -> None:
        """Ignored: these tokens depend on nothing but the last one."""


def make_fake_core(
    *,
    vocab_size: int = 100,
    num_pages: int = 64,
    page_size: int = 4,
    max_model_len: int = 128,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_queue_len: int = 1024,
    eos_token_ids: tuple[int, ...] = (),
    policy: str = "fcfs",
    prefix_cache: bool = True,
    min_batch_size: int = 1,
    max_wait: float = 0.0,
    group_prompts: bool = False,
    step_sizes: tuple[int, ...] = (),
    costs: PreemptionCosts | None = None,
    runner: FakeRunner | None = None,
    delay: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    overlaps: bool = False,
    streams: bool = False,
    kept: KeptLimits = NOTHING_KEPT,
) -> EngineCore:
    """An EngineCore over a FakeRunner."""
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_queue_len=max_queue_len,
        policy=policy,
        prefix_cache=prefix_cache,
        min_batch_size=min_batch_size,
        max_wait=max_wait,
        group_prompts=group_prompts,
        step_sizes=step_sizes,
    )
    max_pages = -(-max_model_len // page_size)
    buckets = make_buckets(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_pages=max_pages,
        streams=streams,
    )
    return EngineCore(
        Scheduler(
            config,
            PagePool(num_pages, page_size),
            RowTable(max_num_seqs, max_pages),
            costs=costs,
            kept=kept,
        ),
        runner or FakeRunner(vocab_size, delay),
        buckets,
        EngineLimits(vocab_size, max_model_len, eos_token_ids, streams),
        clock,
        overlaps=overlaps,
    )


def trace_core(core: EngineCore, path: Path) -> Tracer:
    """Record a core that has no requests yet."""
    core._observer = tracer = Tracer(path, core.scheduler, clock=core._clock)
    return tracer


class ContextRunner(FakeRunner):
    """Keeps a cache of token ids, so that a wrong page anywhere changes the answer.

    The next token is a hash of all tokens the sequence attends to, read through its page table, and
    of the seed of its row.
    """

    def __init__(self, vocab_size: int, num_pages: int, page_size: int) -> None:
        super().__init__(vocab_size)
        self.cache = np.full((num_pages, page_size), -1, np.int64)
        self.host: dict[str, np.ndarray] = {}
        self.num_copies = 0  # pages copied to other pages

    def move(self, moves: PageMoves) -> None:
        """Move pages with what is in them."""
        self.host |= {m.key: self.cache[list(m.page_ids)] for m in moves.out}
        for move in moves.back:
            self.cache[list(move.page_ids)] = self.host[move.key]
        self.num_copies += len(moves.copies)
        self.cache[[c.target for c in moves.copies]] = self.cache[[c.source for c in moves.copies]]
        for name in moves.drop:
            del self.host[name]
        super().move(moves)

    def read_copy(self, key: str, num_pages: int) -> list[np.ndarray]:
        """What is in them."""
        return [self.host[key][:num_pages]]

    def load_copy(self, key: str, num_pages: int, chunks: Sequence[np.ndarray]) -> None:
        """Put it there."""
        super().load_copy(key, num_pages, chunks)
        self.host[key] = chunks[0]

    def _sample(self, batch: Batch, token_ids: np.ndarray) -> list[int]:
        """Write the new tokens to their slots and read the contexts back."""
        flat, num_slots = self.cache.reshape(-1), self.cache.size
        live = batch.slot_mapping < num_slots
        flat[batch.slot_mapping[live]] = token_ids[live]
        owner = np.searchsorted(batch.query_starts[1:], batch.sample_rows, side="right")
        tokens = []
        for row, i in enumerate(np.minimum(owner, len(batch.context_lens) - 1)):
            context = self.cache[batch.page_table[i]].reshape(-1)[: batch.context_lens[i]]
            if batch.windows is not None and batch.sink_lens is not None and batch.windows[i]:
                sink = batch.sink_lens[i]
                rest = context[max(sink, len(context) - batch.windows[i]) :]
                context = np.concatenate([context[:sink], rest])
            seed = int(batch.sampling.seeds[row, 0])
            tokens.append(context_hash(context.tolist(), self.vocab_size, seed))
        return tokens


class LossyRunner(ContextRunner):
    """Finds every third copy lost that is to come back."""

    num_fetched = 0

    def fetch_copy(self, key: str) -> bool:
        """Whether nobody has lost it."""
        self.num_fetched += 1
        return self.num_fetched % 3 > 0


def context_hash(tokens: list[int], vocab_size: int, seed: int = 0) -> int:
    """A token that depends on every token, on their order, and on the low half of the seed."""
    value = 7 + seed % 2**32
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return value % vocab_size


def context_oracle(
    prompt: list[int],
    count: int,
    vocab_size: int,
    seed: int = 0,
    streaming: Streaming | None = None,
) -> list[int]:
    """What ContextRunner answers, from the tokens and the seed alone."""
    tokens = list(prompt)
    for _ in range(count):
        seen = tokens
        if streaming is not None:
            rest = tokens[max(streaming.sink, len(tokens) - streaming.window) :]
            seen = tokens[: streaming.sink] + rest
        tokens.append(context_hash(seen, vocab_size, seed))
    return tokens[len(prompt) :]


_ids = itertools.count()


def make_request(
    core: EngineCore,
    prompt: list[int],
    config: GenerationConfig | None = None,
    *,
    request_id: str | None = None,
    deadline: float | None = None,
    seed: int = 0,
    **options: Any,
) -> Request:
    """A request checked against the core's limits; `options` sets priority, client and so on."""
    config = config or GenerationConfig(max_new_tokens=4)
    return core.limits.resolve(
        request_id or f"r{next(_ids)}",
        prompt,
        config,
        fresh_seed=seed,
        arrival_time=0.0,
        deadline=deadline,
        options=RequestOptions(**options),
    )


def run_to_end(core: EngineCore) -> dict[str, list[int]]:
    """Step until idle; the token ids of every request."""
    tokens: dict[str, list[int]] = {}
    while core.has_work:
        for output in core.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        core.scheduler.check_integrity()
    return tokens


def count_up(last: int, count: int, vocab_size: int) -> list[int]:
    """What FakeRunner answers after `last`."""
    return [int(t) for t in np.arange(last + 1, last + 1 + count) % vocab_size]
