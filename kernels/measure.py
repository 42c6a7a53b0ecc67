"""Times the kernels on the default device against ceilings measured in the same run.

Every timed shape is checked in float64 first, inputs rotate over more than a gigabyte so that the
L2 cache is cold, and launch time counts. Called by `swiftjax bench kernels`. Heads are those of
Llama-3-8B: 32 query and 8 KV heads of width 128, bfloat16, pages of 64.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from swiftjax.kernels import Implementation, Pages, decode_attention, ragged_attention, write_kv

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 64
SCALE = HEAD_DIM**-0.5
TOKEN_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * 2  # keys and values of one token, bfloat16
POOL_TOKENS = 5120 * PAGE_SIZE  # 1.3 GB of keys and values
ROUNDS, ROUND_S, WRITE_REPEATS = 7, 0.03, 20
TOLERANCE = 1e-2

DECODES = ((64, 576), (256, 576), (16, 8192), (1, 8192), (1, 131072))
WHOLE_PROMPT = "prefill_cudnn"  # the same by cuDNN, the copy out of the pages included
# name -> (cached, new) tokens of every sequence
RAGGED = {
    "prefill": [(0, 8192)],
    WHOLE_PROMPT: [(0, 8192)],
    "prefill_chunk": [(30000, 2048)],
    "mixed": [(575, 1)] * 64 + [(0, 2048)],
    "mixed_chunk_alone": [(0, 2048)],
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One timed shape; `limit` and `value` in `unit`, `spread` the fastest and slowest round."""

    workload: str
    batch: int
    context: int
    value: float
    unit: str
    limit: float
    spread: tuple[float, float]
    microseconds: float
    error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """What this device does at best: GB/s and TFLOP/s."""

    read: float
    copy: float
    matmul: float


def measure_all(implementation: Implementation) -> Iterator[Measurement]:
    """Measure the ceilings, then every shape; a wrong or unreal result raises AssertionError."""
    ceilings = measure_ceilings()
    shape = (POOL_TOKENS // PAGE_SIZE, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM)
    pools = [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(2)]
    for batch, context in DECODES:
        yield measure_decode(pools, batch, context, ceilings, implementation)
    for name, sequences in RAGGED.items():
        whole = name == WHOLE_PROMPT
        attend = partial(
            ragged_attention, scale=SCALE, whole_prompt=whole, implementation=implementation
        )
        yield measure_ragged(pools, name, sequences, ceilings, attend)
    yield measure_write(pools, 8192, ceilings, implementation)


def seconds(f: Callable[..., object], arguments: tuple[object, ...], calls: int) -> list[float]:
    """Time rounds of `f`, which runs the kernel `calls` times; seconds a call, sorted."""
    jax.block_until_ready(f(*arguments))
    start = time.perf_counter()
    jax.block_until_ready(f(*arguments))
    repeats = max(2, int(ROUND_S / (time.perf_counter() - start)))
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(repeats):
            result = f(*arguments)
        jax.block_until_ready(result)
        rounds.append((time.perf_counter() - start) / repeats / calls)
    return sorted(rounds)


def measure_ceilings() -> Ceilings:
    """Read and copy 2 GiB, multiply 8192-wide bfloat16 matrices."""
    big = jax.random.normal(jax.random.key(0), (1 << 30,), jnp.bfloat16)
    read = seconds(jax.jit(lambda x: x.astype(jnp.float32).sum()), (big,), 1)
    copy = seconds(jax.jit(jnp.copy), (big,), 1)
    square = jax.random.normal(jax.random.key(1), (8192, 8192), jnp.bfloat16)
    matmul = seconds(jax.jit(jnp.matmul), (square, square), 1)
    return Ceilings(
        read=big.nbytes / read[ROUNDS // 2] / 1e9,
        copy=2 * big.nbytes / copy[ROUNDS // 2] / 1e9,
        matmul=2 * 8192**3 / matmul[ROUNDS // 2] / 1e12,
    )


def measure_decode(
    pools: list[jax.Array],
    batch: int,
    context: int,
    ceilings: Ceilings,
    implementation: Implementation,
) -> Measurement:
    """Time a chain of decode attentions over disjoint pages; an output is the next query."""
    pages = np.random.default_rng(batch).permutation(POOL_TOKENS // PAGE_SIZE).astype(np.int32)
    columns = -(-context // PAGE_SIZE)
    sets = len(pages) // (batch * columns)
    tables = pages[: sets * batch * columns].reshape(sets, batch, columns)
    lens = jnp.full((batch,), context, jnp.int32)
    q = jax.random.normal(jax.random.key(2), (batch, NUM_HEADS, HEAD_DIM), jnp.bfloat16)

    def chain(q: jax.Array, k: jax.Array, v: jax.Array, *tables: jax.Array) -> list[jax.Array]:
        outs = []
        for table in tables:
            q = decode_attention(q, k, v, table, lens, scale=SCALE, implementation=implementation)
            outs.append(q)
        return [outs[0], outs[-1]]

    arguments = (q, *pools, *map(jnp.asarray, tables))
    compiled = jax.jit(chain)
    first = compiled(*arguments)[0]
    rows = {0: (0, context), batch - 1: (batch - 1, context)}
    error = check(first, q, pools, tables[0], rows)
    times = seconds(compiled, arguments, sets)
    amount = batch * context * TOKEN_BYTES / 1e9
    shape = {"workload": "paged_decode", "batch": batch, "context": context}
    return measurement(shape, times, amount, "GB/s", ceilings.read, error)


def measure_ragged(
    pools: list[jax.Array],
    name: str,
    sequences: list[tuple[int, int]],
    ceilings: Ceilings,
    attend: Callable[..., jax.Array],
) -> Measurement:
    """Time one ragged attention; the arithmetic counts what the causal mask leaves."""
    contexts = np.array([cached + new for cached, new in sequences], np.int32)
    starts = np.cumsum([0] + [new for _, new in sequences]).astype(np.int32)
    columns = -(-int(contexts.max()) // PAGE_SIZE)
    pages = np.random.default_rng(0).permutation(POOL_TOKENS // PAGE_SIZE).astype(np.int32)
    table, used = np.zeros((len(sequences), columns), np.int32), 0
    for row, context in zip(table, contexts, strict=True):
        count = -(-int(context) // PAGE_SIZE)
        row[:count], used = pages[used : used + count], used + count
    q = jax.random.normal(jax.random.key(3), (int(starts[-1]), NUM_HEADS, HEAD_DIM), jnp.bfloat16)
    arguments = (q, *pools, *map(jnp.asarray, (table, starts, contexts)))
    compiled = jax.jit(attend)
    last = len(sequences) - 1
    rows = {0: (0, int(contexts[0] - sequences[0][1]) + 1), len(q) - 1: (last, int(contexts[-1]))}
    error = check(compiled(*arguments), q, pools, table, rows)
    times = seconds(compiled, arguments, 1)
    pairs = sum(new * cached + new * (new + 1) / 2 for cached, new in sequences)
    amount = 4.0 * NUM_HEADS * HEAD_DIM * pairs / 1e12
    shape = {"workload": name, "batch": len(sequences), "context": int(contexts.max())}
    return measurement(shape, times, amount, "TFLOP/s", ceilings.matmul, error)


def measure_write(
    pools: list[jax.Array], num_tokens: int, ceilings: Ceilings, implementation: Implementation
) -> Measurement:
    """Time KV writes into disjoint pages of a donated pool; bytes read plus bytes written."""
    sets = POOL_TOKENS // num_tokens // 2
    pages = np.random.default_rng(0).permutation(POOL_TOKENS // PAGE_SIZE)
    slots = (pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).astype(np.int32).reshape(-1)
    slots = [jnp.asarray(part) for part in slots[: sets * num_tokens].reshape(sets, num_tokens)]
    shape = (num_tokens, NUM_KV_HEADS, HEAD_DIM)
    tokens = [jax.random.normal(jax.random.key(9 + i), shape, jnp.bfloat16) for i in range(sets)]

    def write(k: Pages, v: Pages, *arrays: jax.Array) -> tuple[Pages, Pages]:
        new, where = arrays[:sets], arrays[sets:]
        for i in range(sets):
            k, v = write_kv(k, v, new[i], new[i - 1], where[i], implementation=implementation)
        return k, v

    compiled, rest = jax.jit(write, donate_argnums=(0, 1)), (*tokens, *slots)
    k, v = compiled(*map(jnp.copy, pools), *rest)
    written = np.asarray(k[slots[0] // PAGE_SIZE, :, slots[0] % PAGE_SIZE])
    assert np.array_equal(written, np.asarray(tokens[0])), "write_kv stored other values"
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(WRITE_REPEATS):
            k, v = compiled(k, v, *rest)
        jax.block_until_ready((k, v))
        rounds.append((time.perf_counter() - start) / sets / WRITE_REPEATS)
    amount = 2 * num_tokens * TOKEN_BYTES / 1e9
    named = {"workload": "kv_write", "batch": 1, "context": num_tokens}
    return measurement(named, sorted(rounds), amount, "GB/s", ceilings.copy, 0.0)


def measurement(
    shape: dict[str, object],
    times: list[float],
    amount: float,
    unit: str,
    limit: float,
    error: float,
) -> Measurement:
    """Make a record of the median; a figure above the measured ceiling is refused as unreal."""
    value = amount / statistics.median(times)
    assert value <= limit * 1.02, f"{shape}: {value:.0f} {unit} is above the ceiling {limit:.0f}"
    assert error <= TOLERANCE, f"{shape}: relative error {error:.1e} is above {TOLERANCE}"
    return Measurement(
        **shape,  # type: ignore[arg-type]
        value=value,
        unit=unit,
        limit=limit,
        spread=(amount / times[-1], amount / times[0]),
        microseconds=statistics.median(times) * 1e6,
        error=error,
    )


def check(
    out: jax.Array,
    q: jax.Array,
    pools: list[jax.Array],
    table: np.ndarray,
    rows: dict[int, tuple[int, int]],
) -> float:
    """Relative error of some rows of the output, each given as (sequence, keys it attends)."""
    wanted, got = [], []
    for row, (seq, context) in rows.items():
        ids = table[seq, : -(-context // PAGE_SIZE)]
        keys, values = (
            np.asarray(pool[ids], np.float64)
            .transpose(0, 2, 1, 3)
            .reshape(-1, NUM_KV_HEADS, HEAD_DIM)
            for pool in pools
        )
        for head in (0, 13, NUM_HEADS - 1):
            group = head // (NUM_HEADS // NUM_KV_HEADS)
            scores = keys[:context, group] @ np.asarray(q[row, head], np.float64) * SCALE
            weights = np.exp(scores - scores.max())
            wanted.append(weights @ values[:context, group] / weights.sum())
            got.append(np.asarray(out[row, head], np.float64))
    return float(np.linalg.norm(np.subtract(got, wanted)) / np.linalg.norm(wanted))
