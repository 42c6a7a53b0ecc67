"""The engine over a real (tiny) model: paging, chunks and company change nothing."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from swiftjax.engine.request import GenerationConfig
from swiftjax.model.assembly import make_runner
from swiftjax.model.params import random_params
from tests.fakes import make_request, run_to_end
from tests.forward import forward_logits
from tests.tiny import TINY, shared_core, tiny_core, tiny_params


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed + length).integers(0, TINY.vocab_size, length).tolist()


def full_forward(tokens: list[int]) -> np.ndarray:
    """Logits [T V] of one forward pass over the whole text, attention by the plain reference."""
    return forward_logits(TINY, tiny_params(), tokens, implementation="reference")


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunks", [[50], [7, 43], [16, 16, 16, 1, 1], [1] * 50, [33] + [1] * 17])
def test_any_cut_into_steps_gives_the_full_forward(page_size: int, chunks: list[int]) -> None:
    prompt = prompt_of(50)
    full = full_forward(prompt)
    paged = forward_logits(TINY, tiny_params(), prompt, chunks=chunks, page_size=page_size)
    np.testing.assert_allclose(paged, full, atol=1e-4)


@pytest.mark.parametrize("prompt_len", [15, 16, 17, 31, 32, 33])
def test_b042_page_edges_keep_the_logits(prompt_len: int) -> None:
    """Logits equal a forward without cache at each step, around multiples of the page size."""
    tokens = prompt_of(prompt_len + 40)
    full = full_forward(tokens)
    cached = forward_logits(TINY, tiny_params(), tokens, chunks=[prompt_len] + [1] * 40)
    np.testing.assert_allclose(cached, full, atol=1e-4)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5])
def test_b048_each_sequence_equals_its_solo_run(page_size: int, batch: int) -> None:
    """Bucketed padding and neighbours change no token, and barely a log-probability."""
    lengths = [5, 7, 16, 33, 9][:batch]
    config = GenerationConfig(max_new_tokens=20)

    def run(prompts: list[list[int]]) -> dict[int, tuple[list[int], list[float]]]:
        core = shared_core(page_size)
        names = {}
        for prompt in prompts:
            request = make_request(core, prompt, config)
            names[request.request_id] = len(prompt)
            core.submit(request)
        answers: dict[int, tuple[list[int], list[float]]] = {n: ([], []) for n in names.values()}
        while core.has_work:
            for output in core.step():
                tokens, logprobs = answers[names[output.request_id]]
                tokens += output.token_ids
                logprobs += output.logprobs
        assert core.stats().num_free_pages == core.stats().num_pages
        return answers

    together = run([prompt_of(n) for n in lengths])
    for length in lengths:
        alone = run([prompt_of(length)])[length]
        assert together[length][0] == alone[0]
        np.testing.assert_allclose(together[length][1], alone[1], atol=1e-4)


def test_b048_pallas_gives_what_xla_gives() -> None:
    """The GPU kernels, interpreted: ragged prompts in one batch, over a padded bucket."""
    config = dataclasses.replace(TINY, num_layers=1, head_dim=16)
    params = random_params(config, jnp.dtype("float32"))
    answers = []
    for implementation in ("xla", "triton"):
        runner = make_runner(
            config, params, max_num_seqs=4, num_pages=16, page_size=16, max_model_len=64,
            implementation=implementation,
        )  # fmt: skip
        core = tiny_core(
            num_pages=16, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=96, runner=runner
        )
        for length in (5, 16, 33):
            request = make_request(core, prompt_of(length), request_id=str(length))
            core.submit(request)
        answers.append(run_to_end(core))
    assert answers[0] == answers[1] and len(answers[0]["33"]) == 4


def test_engine_greedy_equals_full_forward() -> None:
    core = shared_core()
    request = make_request(core, prompt_of(20), GenerationConfig(max_new_tokens=12))
    core.submit(request)
    answer = run_to_end(core)[request.request_id]
    logits = full_forward([*prompt_of(20), *answer])
    assert logits[19:-1].argmax(-1).tolist() == answer


def test_b015_seed_does_not_depend_on_the_company() -> None:
    """Alone, with an unseeded neighbour, behind neighbours that finish first: the same draw."""
    config = GenerationConfig(max_new_tokens=16, temperature=1.0, seed=42)

    def run(*neighbours: GenerationConfig, first: bool = True) -> list[int]:
        core = shared_core()
        me = make_request(core, prompt_of(9), config)
        others = [make_request(core, prompt_of(5 + i), c, seed=i) for i, c in enumerate(neighbours)]
        for request in [me, *others] if first else [*others, me]:
            core.submit(request)
        return run_to_end(core)[me.request_id]

    alone = run()
    unseeded = GenerationConfig(max_new_tokens=16, temperature=1.0)
    short = GenerationConfig(max_new_tokens=3, temperature=0.7, top_k=4)
    assert run(unseeded) == alone
    assert run(short, short, unseeded, first=False) == alone
    assert run(GenerationConfig(max_new_tokens=30), first=False) == alone
    other_seed = GenerationConfig(max_new_tokens=16, temperature=1.0, seed=43)
    core = shared_core()
    core.submit(make_request(core, prompt_of(9), other_seed, request_id="other"))
    assert run_to_end(core)["other"] != alone
