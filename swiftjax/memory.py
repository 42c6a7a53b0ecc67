"""The memory budget in plain numbers: weights, temporaries, and the pages that fit beside them.

Pure functions of sizes; measures nothing itself. Used when an engine is built, and for the table
that every out-of-memory message prints.
"""

from dataclasses import dataclass
from typing import NamedTuple

from swiftjax.errors import InvalidRequestError
from swiftjax.model_config import ModelConfig

GIB = 1024**3
# What is kept for samplers, a score: 25 by the compiler; with this an H200 has run.
SAMPLER_BYTES = 60


class DeviceMemory(NamedTuple):
    """What a device says of its memory, in bytes."""

    device: str
    in_use: int
    limit: int


class DeviceReport(NamedTuple):
    """What this process has done to its devices so far; a CPU has nothing to say of memory."""

    num_compiles: int
    compile_seconds: float
    memory: tuple[DeviceMemory, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Where the device memory goes, in bytes; `num_pages` is what the KV cache gets."""

    budget: int
    weights: int
    temporaries: int
    page_bytes: int
    page_size: int
    num_pages: int

    def table(self) -> str:
        """The plan as a few aligned lines."""
        kv = self.num_pages * self.page_bytes
        rows = [
            ("device memory usable", self.budget),
            ("weights", self.weights),
            ("temporaries of the largest step", self.temporaries),
            (f"KV cache: {self.num_pages} pages of {self.page_size} tokens", kv),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:<{width}}  {size / GIB:8.2f} GiB" for name, size in rows)


def temporaries(config: ModelConfig, *, num_tokens: int, num_rows: int, itemsize: int) -> int:
    """Bytes the largest step needs beside weights and cache.

    Of the forward pass what the compiler asks for (`memory_analysis`; a GPU test compares) and a
    quarter more: the residual stream twice, and around it either the two halves of the MLP and
    their product, or queries, keys, values and what attention makes of them. Activations in 8 bits
    come of halves of 32 bits; where e4m3 needs half of that, the rest is to spare. Many tokens are
    multiplied by a matrix of 4 or 8 bits after it was written out, which the head may be. Passes
    and samplers take turns; hidden rows outlive them, and logits of every size of decodes: of the
    largest, and of powers of two that are smaller, together less than twice that.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    kind = config.quantization.kind if config.quantization else None
    heads = (4 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    product = 10 * inner if kind in ("fp8", "w8a8") else 3 * inner * itemsize
    stream = 2 * hidden * itemsize
    forward = num_tokens * (stream + max(product, heads * itemsize))
    if kind:
        head = config.vocab_size if config.weight_format("head") else 0
        written_out = hidden * max(2 * inner, head) * itemsize
        halves = num_tokens * (stream + 2 * inner * itemsize)
        forward = max(forward, written_out + halves)
    scores = num_rows * config.vocab_size
    kept = (num_tokens * hidden + 3 * scores) * itemsize
    return max(forward * 5 // 4, SAMPLER_BYTES * scores) + kept


def plan_pages(
    *,
    budget: int,
    weights: int,
    temporaries: int,
    page_bytes: int,
    page_size: int,
    max_pages: int,
    asked_pages: int | None,
) -> MemoryPlan:
    """Give the KV cache what is left, `max_pages` at most; or exactly `asked_pages`.

    Raises InvalidRequestError with the table when what was asked, or one page, does not fit.
    """
    fitting = max(0, (budget - weights - temporaries) // page_bytes)
    num_pages = min(fitting, max_pages) if asked_pages is None else asked_pages
    plan = MemoryPlan(
        budget=budget,
        weights=weights,
        temporaries=temporaries,
        page_bytes=page_bytes,
        page_size=page_size,
        num_pages=num_pages,
    )
    if num_pages > fitting or num_pages == 0:
        raise InvalidRequestError(
            f"out of device memory: the KV cache would take {max(1, num_pages)} pages, "
            f"{fitting} fit (max_total_token_num={fitting * page_size}).\n{plan.table()}\n"
            "Lower max_total_token_num or max_num_batched_tokens, or raise gpu_memory_utilization"
        )
    return plan


def fitting_sequences(plan: MemoryPlan, length: int, max_num_seqs: int) -> int:
    """How many sequences of `length` tokens the cache holds at once, `max_num_seqs` at most."""
    pages_each = -(-length // plan.page_size)
    return min(max_num_seqs, plan.num_pages // pages_each)
