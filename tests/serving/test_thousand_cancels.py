"""A thousand cancels at random points: within one step the pool is as it was at the start."""

import asyncio
import random
from collections.abc import AsyncGenerator

import pytest

from swiftjax.engine.core import EngineCore
from swiftjax.engine.preemption import PreemptionCosts
from swiftjax.engine.request import GenerationConfig, StreamOutput
from tests.fakes import FakeRunner, make_fake_core, make_request
from tests.serving.harness import make_core, make_engine, until

CANCELS = 500  # in each of the two loops, on the core and through streams
SWAP = PreemptionCosts(host_pages=64, seconds_per_token=1.0)


def point_of(core: EngineCore, request_id: str, max_new_tokens: int) -> str:
    """Where a request stands: what is about to be cancelled."""
    sequences = core.scheduler.sequences.by_id
    sequence = sequences.get(request_id) or sequences.get(f"{request_id}/0")
    if sequence is None:
        return "finished"
    if sequence.state != "running":
        return "queued" if sequence.num_output == 0 else "preempted"
    if sequence.num_output == 0:
        return "prefill"
    return "last token" if sequence.num_output == max_new_tokens - 1 else "decode"


@pytest.mark.parametrize("overlaps", [False, True], ids=["plain", "overlapped"])
def test_p2_cancels_on_the_core(overlaps: bool) -> None:
    rng = random.Random(7)
    core = make_fake_core(
        num_pages=24, max_model_len=64, max_num_seqs=3, max_num_batched_tokens=16, costs=SWAP,
        prefix_cache=True, overlaps=overlaps,
    )  # fmt: skip
    points: dict[str, int] = {}
    for _ in range(CANCELS):
        new = rng.choice([2, 2, 9, 30])
        config = GenerationConfig(max_new_tokens=new, n=rng.choice([1, 1, 2, 4]))
        requests = [
            make_request(core, [rng.randrange(100)] * rng.choice([1, 3, 29]), config)
            for _ in range(rng.choice([1, 2, 3]))
        ]
        for request in requests:
            core.submit(request)
        for _ in range(rng.choice([0, 1, 2, 3, 4, 9, 15])):
            if rng.random() < 0.3:
                core.scheduler.preemption.preempt_next()
            core.step()
        victim = rng.choice(requests).request_id
        point = point_of(core, victim, new)
        points[point] = points.get(point, 0) + 1
        for request in requests:
            core.abort(request.request_id)
        core.step()
        core.scheduler.check_integrity()
        assert core.stats().num_free_pages == core.stats().num_pages
        assert not core.has_work and not core.scheduler.sequences.forks.num_forking
    assert set(points) == {"queued", "prefill", "decode", "preempted", "last token", "finished"}
    assert min(points.values()) >= 5


@pytest.mark.parametrize("overlaps", [False, True], ids=["plain", "overlapped"])
def test_p2_cancels_of_streams(overlaps: bool) -> None:
    """Clients leave before the first token, after some, at the last and after the end."""
    rng = random.Random(11)
    core = make_core(max_num_seqs=4, num_pages=256, max_queue_len=512, overlaps=overlaps)
    runner = core._runner
    assert isinstance(runner, FakeRunner)

    async def read(stream: AsyncGenerator[StreamOutput, None], count: int) -> None:
        for _ in range(count):
            await anext(stream, None)

    async def leave(stream: AsyncGenerator[StreamOutput, None], num_outputs: int) -> None:
        if num_outputs:
            await read(stream, num_outputs)
        else:
            task = asyncio.create_task(read(stream, 1))
            await asyncio.sleep(rng.random() * 0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await stream.aclose()

    async def main() -> None:
        engine = make_engine(core)
        for _ in range(CANCELS // 20):
            config = GenerationConfig(max_new_tokens=8, n=rng.choice([1, 2]), ignore_eos=True)
            await asyncio.gather(
                *(
                    leave(engine.stream([65] * rng.randrange(1, 200), config), rng.randrange(9))
                    for _ in range(20)
                )
            )
            num_steps = len(runner.batches)
            await until(lambda: not core.has_work)
            assert len(runner.batches) - num_steps <= 1
            assert core.stats().num_free_pages == core.stats().num_pages
            runner.batches.clear()
        await engine.close()

    asyncio.run(main())
    core.scheduler.check_integrity()
