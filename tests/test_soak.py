"""Mixed load on a real (tiny) model: memory, pages, files and programs stay as they were."""

import asyncio
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest

from swiftjax.engine.async_engine import AsyncEngine
from swiftjax.engine.core import EngineCore
from swiftjax.engine.engine_link import ThreadLink
from swiftjax.engine.preemption import PreemptionCosts
from swiftjax.engine.request import GenerationConfig, RequestOptions
from swiftjax.errors import InvalidRequestError
from tests.compiles import no_compiles
from tests.serving.harness import byte_tokenizer, until
from tests.tiny import TINY, tiny_core

SECONDS = 300 if os.environ.get("SWIFTJAX_SOAK") else 30
CLIENTS = 12
MAX_MODEL_LEN = 160
MAX_GROWTH_MIB = 8  # of the fitted line, over the part of the time that is looked at
# Half the sequences are cheaper to move than to compute again.
COSTS = PreemptionCosts(host_pages=24, seconds_per_page=1.0, seconds_per_token=0.16)
SAMPLERS = (
    {},
    {"temperature": 1.0, "top_p": 0.9, "n": 3},
    {"temperature": 0.7, "top_k": 5, "logprobs": 3},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"logit_bias": {5: 3.0}, "banned_token_ids": (7,), "min_p": 0.1, "temperature": 1.0},
    {"echo": True, "logprobs": 1},
)


class Load:
    """Clients that send one request after the other: 10 % leave early, 5 % ask too much."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.counts = {"finished": 0, "cancelled": 0, "too long": 0}

    async def client(self, seed: int, end: float) -> None:
        rng = random.Random(seed)
        while time.monotonic() < end:
            kind = rng.random()
            config = GenerationConfig(max_new_tokens=rng.randrange(1, 40), **rng.choice(SAMPLERS))
            length = MAX_MODEL_LEN if kind < 0.05 else rng.randrange(1, 90)
            prompt = [rng.randrange(TINY.vocab_size)] * (length // 2)
            prompt += [rng.randrange(TINY.vocab_size) for _ in range(length - len(prompt))]
            if kind < 0.05:
                with pytest.raises(InvalidRequestError):
                    await self.read(prompt, config, rng, 10**6)
                self.counts["too long"] += 1
            elif kind < 0.15:
                await self.read(prompt, config, rng, rng.randrange(5))
                self.counts["cancelled"] += 1
            else:
                await self.read(prompt, config, rng, 10**6)
                self.counts["finished"] += 1

    async def read(
        self, prompt: list[int], config: GenerationConfig, rng: random.Random, count: int
    ) -> None:
        options = RequestOptions(priority=rng.randrange(3), client_id=str(rng.randrange(3)))
        stream = self.engine.stream(prompt, config, options=options)
        try:
            async for _ in stream:
                if (count := count - 1) < 0:
                    break
        finally:
            await stream.aclose()


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def num_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def watch(end: float, samples: list[tuple[float, float]]) -> None:
    while time.monotonic() < end:
        samples.append((time.monotonic(), resident_mib()))
        await asyncio.sleep(0.25)


async def soak(core: EngineCore) -> tuple[dict[str, int], list[tuple[float, float]]]:
    """Run the load: a fifth of the time to settle, then the part that is looked at."""
    engine = AsyncEngine(ThreadLink(core), byte_tokenizer(), core.limits)
    load = Load(engine)
    settled = time.monotonic() + SECONDS / 5
    await asyncio.gather(*(load.client(-1 - i, settled) for i in range(CLIENTS)))
    await until(lambda: not core.has_work)
    files, end = num_files(), settled + SECONDS * 4 / 5
    samples: list[tuple[float, float]] = []
    with no_compiles():
        clients = [load.client(i, end) for i in range(CLIENTS)]
        await asyncio.gather(*clients, watch(end, samples))
    await until(lambda: not core.has_work)
    assert num_files() == files
    await engine.close()
    return load.counts, samples


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_p3_mixed_load_leaves_everything_as_it_was() -> None:
    core = tiny_core(
        num_pages=26, page_size=8, max_model_len=MAX_MODEL_LEN, max_num_seqs=4,
        max_num_batched_tokens=32, costs=COSTS, overlaps=True,
    )  # fmt: skip
    runner = core._runner
    runner.warm_up(core._buckets.all)  # type: ignore[attr-defined]
    counts, samples = asyncio.run(soak(core))
    core.scheduler.check_integrity()
    assert core.stats().num_free_pages == core.stats().num_pages
    assert core.scheduler.num_preemptions > 3
    assert min(counts.values()) > 0 and counts["finished"] > counts["cancelled"]
    times, sizes = np.array(samples).T
    growth = np.polyfit(times, sizes, 1)[0] * (times[-1] - times[0])
    print(f"{counts}, {core.scheduler.num_preemptions} preemptions, {growth:+.2f} MiB")
    assert growth < MAX_GROWTH_MIB, f"from {sizes[0]:.1f} to {sizes[-1]:.1f} MiB"
