"""Runs steps: owns the weights, the state on the device and one compiled program per batch shape.

A step is a forward pass, a pure function of (params, kv_cache, last tokens, packed batch), and a
sampler. Everything is dispatched without waiting, so the next step can follow before this one is
read. Knows nothing of requests; called by the engine core.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt16

from swiftjax.batch import (
    ALL_ALLOWED,
    NONE,
    Batch,
    BatchShape,
    PageMoves,
    TokenEdits,
    empty_batch,
    empty_edits,
)
from swiftjax.model.fingerprint import fingerprint
from swiftjax.model.kv_swap import KVSwap
from swiftjax.model.packing import pack
from swiftjax.model.page_copies import PageCopies
from swiftjax.model.programs import NUM_THREADS, Programs, State, choose_sampler
from swiftjax.model.sampling import Logits
from swiftjax.model.step_results import DeviceTokens

NO_MOVES = PageMoves()


class ModelRunner:
    """Compiles, warms up and dispatches steps."""

    def __init__(
        self, programs: Programs, params: tuple[Array, ...], make_state: Callable[[], State]
    ) -> None:
        """`params` are bound by the model of `programs`; `allocate` calls `make_state`."""
        self._programs = programs
        self._params = params
        self._make_state = make_state
        self._made: State | None = None
        self._swap: KVSwap | None = None
        self._fingerprint: str | None = None
        self.copies = PageCopies()
        state = programs.state
        pages = state.kv_cache.keys[0]
        self._num_slots = pages.shape[0] * pages.shape[2]
        self._old_logits: dict[int, Logits] = {}  # by rows; to be donated
        self._no_edits: dict[int, TokenEdits] = {}  # on the device, by number of rows
        self._no_masks: dict[int, Array] = {}  # the same
        set_row = jax.jit(lambda counts, row, values: counts.at[row].set(values), donate_argnums=0)
        values = jax.ShapeDtypeStruct(state.counts.shape[1:], state.counts.dtype)
        row = jax.ShapeDtypeStruct((), jnp.int32)
        self._set_counts = set_row.lower(state.counts, row, values).compile()

    def allocate(self) -> None:
        """Take the memory of the cache, unless it is taken; raises what `make_state` does.

        The cache takes all that is left, of which the compiler wants some for trying out products:
        `warm_up` compiles first, and whoever does without calls this before the first step.
        """
        if self._made is None:
            self._made = self._make_state()

    @property
    def _state(self) -> State:
        assert self._made is not None, "allocate() comes before the first step"
        return self._made

    @_state.setter
    def _state(self, state: State) -> None:
        self._made = state

    @property
    def num_compiles(self) -> int:
        """Programs compiled so far; constant once warm."""
        return self._programs.count

    def warm_up(
        self, shapes: Iterable[BatchShape], progress: Callable[[int, int], None] | None = None
    ) -> float:
        """Compile all that steps of these shapes and moves of pages need, and allocate.

        Returns the seconds taken; `progress` is called with (done, total) after each program.
        """
        start, shapes = time.monotonic(), list(shapes)
        todo = self._programs.of_shapes(shapes)
        with ThreadPoolExecutor(max_workers=NUM_THREADS) as pool:
            for done, _ in enumerate(pool.map(lambda compile: compile(), todo), start=1):
                if progress is not None:
                    progress(done, len(todo))
        self.allocate()
        for num_rows in {shape.num_seqs for shape in shapes}:
            self._old_logits[num_rows] = self._take_logits(num_rows)
        self._swapper()
        return time.monotonic() - start

    def measure(self, shape: BatchShape) -> tuple[float, float]:
        """Seconds to move one page one way, and to compute one prompt token in a full step.

        The step runs on padding, so attention over a context is left out.
        """
        batch = empty_batch(shape, self._num_slots)
        self.dispatch(batch).wait(0)
        start = time.monotonic()
        self.dispatch(batch).wait(0)
        per_token = (time.monotonic() - start) / shape.num_tokens
        return self._swapper().seconds_per_page(self._state.kv_cache), per_token

    def dispatch(self, batch: Batch, moves: PageMoves = NO_MOVES) -> DeviceTokens:
        """Move pages and start one step, without waiting for either.

        Compiles what has not been compiled yet.
        """
        if moves != NO_MOVES:
            self.move(moves)
        kv_cache, last_tokens, counts = self._state
        shape = batch.shape
        packed = pack(batch)
        logits, hidden, kv_cache = self._programs.forward(shape)(
            self._params, kv_cache, last_tokens, packed.step, self._take_logits(shape.num_seqs)
        )
        kind, top = choose_sampler(batch), None
        sampler = self._programs.sampler(shape.num_seqs, kind)
        if kind == "full":
            limits = (self._edits_of(batch), self._masks_of(batch))
            tokens, top, last_tokens, counts = sampler(
                logits, last_tokens, packed.sampling, counts, *limits
            )
        else:
            tokens, last_tokens = sampler(logits, last_tokens, packed.sampling)
        self._state = State(kv_cache, last_tokens, counts)
        self._old_logits[shape.num_seqs] = logits
        has_top = bool(batch.sampling.num_logprobs.any())
        return DeviceTokens(tokens, top if has_top else None, self._score(batch, hidden))

    def move(self, moves: PageMoves) -> None:
        """Move pages between two steps, without waiting for it."""
        kv_cache = self._swapper().apply(self._state.kv_cache, moves)
        self._state = self._state._replace(kv_cache=kv_cache)

    def fetch_copy(self, key: str) -> bool:
        """Have pages at hand that were moved out, to move them in; False when they are lost."""
        return self._swapper().fetch(key)

    def read_copy(self, key: str, num_pages: int) -> list[np.ndarray]:
        """The contents of pages that were moved out, on the host."""
        return self._swapper().read_copy(key, num_pages)

    def load_copy(self, key: str, num_pages: int, chunks: Sequence[np.ndarray]) -> None:
        """Take contents as pages that were moved out; raises ValueError if they do not fit."""
        self._swapper().load_copy(key, num_pages, chunks)

    def fingerprint(self) -> str:
        """What tells model, weights and type of pages from all others; made on the first call."""
        if self._fingerprint is None:
            model = self._programs.model
            stored = jax.tree.leaves(self._programs.state.kv_cache)[0].dtype.name
            described = f"{model.config!r} {stored}"
            self._fingerprint = fingerprint(described, model.weights(self._params))
        return self._fingerprint

    def replace_weights(self, params: Mapping[str, np.ndarray]) -> None:
        """Compute with other weights of the same names, shapes and dtypes; no step may run.

        The old ones are given up first: there may be no room on the device for both.
        """
        model = self._programs.model
        for array in model.weights(self._params):
            array.delete()
        self._params = model.bind({name: jax.device_put(x) for name, x in params.items()})
        self._fingerprint = None

    def _take_logits(self, num_rows: int) -> Logits:
        """Those of the last step of so many rows, taken out since the next step deletes them."""
        if (old := self._old_logits.pop(num_rows, None)) is not None:
            return old
        likes = self._programs.abstract_logits(num_rows)
        return jax.tree.map(lambda like: jax.device_put(np.zeros(like.shape, like.dtype)), likes)

    def _edits_of(self, batch: Batch) -> TokenEdits:
        if batch.edits is not None:
            return batch.edits
        num_rows = len(batch.context_lens)
        if num_rows not in self._no_edits:
            self._no_edits[num_rows] = jax.device_put(empty_edits(num_rows))
        return self._no_edits[num_rows]

    def _masks_of(self, batch: Batch) -> Array | np.ndarray:
        if batch.masks is not None:
            return batch.masks()
        num_rows = len(batch.context_lens)
        if num_rows not in self._no_masks:
            words = np.full((num_rows, self._programs.num_mask_words), ALL_ALLOWED, np.int32)
            self._no_masks[num_rows] = jax.device_put(words)
        return self._no_masks[num_rows]

    def _score(self, batch: Batch, hidden: Array | None) -> Array | None:
        if hidden is None or not (batch.target_ids != NONE).any():
            return None
        scorer = self._programs.scorer(len(batch.token_ids))
        return scorer(self._params, hidden, batch.target_ids)

    def load_counts(self, row: int, counts: UInt16[np.ndarray, " V"]) -> None:
        """Replace one row of the token counts before the next step."""
        counts = self._set_counts(self._state.counts, np.int32(row), counts)
        self._state = self._state._replace(counts=counts)

    def _swapper(self) -> KVSwap:
        if self._swap is None:
            self._swap = KVSwap(self._state.kv_cache, self.copies)
        return self._swap

    def lower(self, shape: BatchShape) -> jax.stages.Lowered:
        """The forward pass of one shape, traced but not compiled: for `plan` and the tests."""
        return self._programs.forward_program(shape).lower()
