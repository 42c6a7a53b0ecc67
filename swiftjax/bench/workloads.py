"""The offline workloads: decode (W1), prefill (W2) and throughput (W3), through the Engine.

Tokens in, tokens out, greedy, ends of sequence ignored. Times are wall clock around whole calls, so
the host's share counts. Yields figures as they are measured.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from swiftjax.api import Engine
from swiftjax.bench.lengths import Throughput, throughput_lengths
from swiftjax.bench.limits import Peaks, decode_ms, prefill_ms
from swiftjax.bench.records import Figure
from swiftjax.engine.request import GenerationConfig
from swiftjax.memory import GIB


class Decode(NamedTuple):
    """One line of W1: prompts of `prompt_len` tokens, the rate over `num_steps` steps."""

    batch: int
    prompt_len: int = 512
    num_steps: int = 128


class Prefill(NamedTuple):
    """One line of W2."""

    batch: int
    length: int


W1 = (*(Decode(batch) for batch in (1, 8, 64, 256)), Decode(16, 8192, 64))
LONG = Decode(1, 130_000, 1000)
MEMORY_TOKENS = 4
W2 = (Prefill(1, 8192), Prefill(16, 1024))


def measure_decode(
    engine: Engine, cases: Iterable[Decode], peaks: Peaks | None, *, rounds: int = 2
) -> Iterator[Figure]:
    """Milliseconds a decode step: (t(steps + 1 tokens) - t(1)) / steps, best of the rounds."""
    for case in cases:
        prompts = random_prompts(engine, [case.prompt_len] * case.batch)
        # The first call of a program takes longer: that of the prompts would be taken off the rest.
        seconds(engine, prompts, 2)
        times = []
        for _ in range(rounds):
            one, many = (seconds(engine, prompts, count) for count in (1, case.num_steps + 1))
            times.append((many - one) / case.num_steps * 1e3)
        context = case.prompt_len + case.num_steps // 2
        limit = peaks and decode_ms(engine.built.model_config, case.batch, context, peaks)
        yield Figure(
            workload="W1", batch=case.batch, context=case.prompt_len, unit="ms/step",
            value=min(times), spread=(min(times), max(times)), limit=limit,
        )  # fmt: skip


def measure_prefill(
    engine: Engine, cases: Iterable[Prefill], peaks: Peaks | None, *, rounds: int = 3
) -> Iterator[Figure]:
    """Milliseconds from prompts to their first tokens, best of the rounds."""
    for case in cases:
        prompts = random_prompts(engine, [case.length] * case.batch)
        times = [seconds(engine, prompts, 1) * 1e3 for _ in range(rounds)]
        limit = peaks and prefill_ms(engine.built.model_config, case.batch, case.length, peaks)
        yield Figure(
            workload="W2", batch=case.batch, context=case.length, unit="ms",
            value=min(times), spread=(min(times), max(times)), limit=limit,
        )  # fmt: skip


def measure_throughput(engine: Engine, case: Throughput, *, rounds: int = 2) -> Figure:
    """Output tokens a second, best of the rounds."""
    prompt_lens, output_lens = throughput_lengths(case)
    prompts = random_prompts(engine, prompt_lens)
    rates = []
    for _ in range(rounds):
        start = time.perf_counter()
        for prompt, count in zip(prompts, output_lens, strict=True):
            engine.add_request(prompt, GenerationConfig(max_new_tokens=count, ignore_eos=True))
        num_done = 0
        while num_done < case.num_requests:
            engine.step()
            num_done += len(engine.get_completed_requests())
        rates.append(sum(output_lens) / (time.perf_counter() - start))
    return Figure(
        workload="W3", batch=case.num_requests, context=case.prompt_lens[1], unit="tokens/s",
        value=max(rates), spread=(max(rates), min(rates)),
    )  # fmt: skip


def measure_long(engine: Engine, case: Decode, peaks: Peaks | None) -> Iterator[Figure]:
    """One long prompt in chunks, then tokens: ms to the first, ms for each further one."""
    prompts = random_prompts(engine, [case.prompt_len] * case.batch)
    chunk = engine.built.core.scheduler.config.max_num_batched_tokens
    seconds(engine, [prompt[:chunk] for prompt in prompts], 2)  # as for W1
    first = seconds(engine, prompts, 1)
    per_token = (seconds(engine, prompts, case.num_steps + 1) - first) / case.num_steps * 1e3
    model, context = engine.built.model_config, case.prompt_len + case.num_steps // 2
    yield Figure(
        workload="long-prefill", batch=case.batch, context=case.prompt_len, unit="ms",
        value=first * 1e3, spread=(first * 1e3, first * 1e3),
        limit=peaks and prefill_ms(model, case.batch, case.prompt_len, peaks),
    )  # fmt: skip
    yield Figure(
        workload="long-decode", batch=case.batch, context=case.prompt_len, unit="ms/step",
        value=per_token, spread=(per_token, per_token),
        limit=peaks and decode_ms(model, case.batch, context, peaks),
    )  # fmt: skip


def measure_memory(engine: Engine) -> Iterator[Figure]:
    """The most bytes this process held on the device so far, against what was planned.

    Before it looks, the largest steps of prompts run, and steps of all rows with every sampler.
    """
    import jax

    device = jax.local_devices()[0]
    if not device.memory_stats():
        return  # a CPU client does not count
    scheduler, limits = engine.built.core.scheduler.config, engine.built.core.limits
    share = 2 * scheduler.max_num_batched_tokens // scheduler.max_num_seqs
    length = max(1, min(share, limits.max_model_len - MEMORY_TOKENS))
    prompts = random_prompts(engine, [length] * scheduler.max_num_seqs)
    greedy = GenerationConfig(max_new_tokens=MEMORY_TOKENS, ignore_eos=True)
    drawn = replace(greedy, temperature=1.0)
    for config in (greedy, drawn, replace(drawn, top_p=0.9), replace(drawn, frequency_penalty=0.1)):
        engine.generate(prompts, config)
    stats = device.memory_stats() or {}
    plan = engine.built.memory
    planned = plan.weights + plan.temporaries + plan.num_pages * plan.page_bytes
    peak = stats["peak_bytes_in_use"] / GIB
    yield Figure(
        workload="memory", batch=scheduler.max_num_seqs, context=limits.max_model_len, unit="GiB",
        value=peak, spread=(peak, peak), details={"planned": round(planned / GIB, 3)},
    )  # fmt: skip


def random_prompts(engine: Engine, lengths: list[int]) -> list[list[int]]:
    """Random token ids, the same in every run."""
    rng = np.random.default_rng(0)
    vocab_size = engine.built.model_config.vocab_size
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]


def seconds(engine: Engine, prompts: list[list[int]], num_tokens: int) -> float:
    """Wall time until all prompts have been answered with so many tokens."""
    config = GenerationConfig(max_new_tokens=num_tokens, ignore_eos=True)
    start = time.perf_counter()
    answers = engine.generate(prompts, config)
    took = time.perf_counter() - start
    assert all(len(answer.token_ids) == num_tokens for answer in answers)
    return took
