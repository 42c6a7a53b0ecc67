"""The scheduler and the core over a data plane that can be computed by hand."""

import pytest

from swiftjax.engine.request import GenerationConfig
from swiftjax.errors import InvalidRequestError, QueueFullError
from tests.fakes import FakeRunner, count_up, make_fake_core, make_request, run_to_end


def test_answers_are_the_hand_computed_ones() -> None:
    core = make_fake_core()
    prompts = [[5], [1, 2, 3], [7] * 30, [9, 8]]
    requests = [make_request(core, p, GenerationConfig(max_new_tokens=6)) for p in prompts]
    for request in requests:
        core.submit(request)
    answers = run_to_end(core)
    for request, prompt in zip(requests, prompts, strict=True):
        assert answers[request.request_id] == count_up(prompt[-1], 6, 100)


def test_long_prompt_does_not_stall_a_running_decode() -> None:
    core = make_fake_core(max_num_batched_tokens=8)
    short = make_request(core, [1], GenerationConfig(max_new_tokens=20))
    core.submit(short)
    core.step()
    core.submit(make_request(core, [2] * 60, GenerationConfig(max_new_tokens=1)))
    for _ in range(8):
        outputs = core.step()
        assert short.request_id in {o.request_id for o in outputs}, "the decode missed a step"


def test_first_come_first_served() -> None:
    core = make_fake_core(max_num_seqs=1)
    for name in "abc":
        core.submit(make_request(core, [1, 2], request_id=name))
    assert list(run_to_end(core)) == ["a", "b", "c"]


def test_stop_token_ends_with_stop_and_is_counted() -> None:
    core = make_fake_core(eos_token_ids=(5,))
    core.submit(make_request(core, [3], GenerationConfig(max_new_tokens=9), request_id="a"))
    outputs = [o for _ in range(2) for o in core.step()]
    assert [o.token_ids for o in outputs] == [(4,), (5,)]
    assert [o.finish_reason for o in outputs] == [None, "stop"]


def test_ignore_eos_and_own_stop_ids() -> None:
    core = make_fake_core(eos_token_ids=(5,))
    config = GenerationConfig(max_new_tokens=9, ignore_eos=True, stop_token_ids=(8,))
    core.submit(make_request(core, [3], config, request_id="a"))
    assert run_to_end(core)["a"] == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_abort_frees_pages_within_one_step(steps: int) -> None:
    core = make_fake_core(max_num_batched_tokens=8)
    config = GenerationConfig(max_new_tokens=40)
    core.submit(make_request(core, [1] * 20, config, request_id="a"))
    for _ in range(steps):
        core.step()
    core.abort("a")
    core.abort("unknown")
    last = core.step()[-1]
    assert (last.request_id, last.finish_reason) == ("a", "abort")
    assert core.stats().num_free_pages == core.stats().num_pages
    assert not core.has_work


def test_deadline_drops_a_queued_request_before_any_work() -> None:
    now = [0.0]
    core = make_fake_core(clock=lambda: now[0])
    core.submit(make_request(core, [1, 2], request_id="late", deadline=1.0))
    now[0] = 1.0
    assert [(o.request_id, o.finish_reason) for o in core.step()] == [("late", "time_limit")]
    runner = core._runner
    assert isinstance(runner, FakeRunner) and not runner.batches


def test_deadline_ends_a_running_request() -> None:
    now = [0.0]
    core = make_fake_core(clock=lambda: now[0])
    core.submit(make_request(core, [1], GenerationConfig(max_new_tokens=50), deadline=3.0))
    reasons = []
    while core.has_work:
        reasons += [o.finish_reason for o in core.step()]
        now[0] += 1.0
    assert reasons == [None, None, None, "time_limit"]


def test_duplicate_id_and_full_queue_are_refused() -> None:
    core = make_fake_core(max_queue_len=2)
    core.submit(make_request(core, [1], request_id="a"))
    with pytest.raises(InvalidRequestError, match="'a' is already in use"):
        core.submit(make_request(core, [1], request_id="a"))
    core.submit(make_request(core, [1], request_id="b"))
    with pytest.raises(QueueFullError, match="max_queue_len"):
        core.submit(make_request(core, [1], request_id="c"))


@pytest.mark.parametrize("prompt_len", [200, 100])
def test_b041_request_larger_than_the_cache(prompt_len: int) -> None:
    """What can never fit is refused at the door, and what stands behind it is served."""
    core = make_fake_core(num_pages=8, page_size=16, max_model_len=512)
    request = make_request(core, [1] * prompt_len, GenerationConfig(max_new_tokens=100))
    with pytest.raises(InvalidRequestError, match="the cache has 128"):
        core.submit(request)
    core.submit(make_request(core, [1] * 10, request_id="next"))
    assert len(run_to_end(core)["next"]) == 4


@pytest.mark.parametrize("prompt_len", [15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_b042_pages_at_multiples_of_the_page_size(prompt_len: int, page_size: int) -> None:
    """After k tokens a sequence holds ceil((P + k - 1) / page) pages, and none at the end."""
    core = make_fake_core(num_pages=128, page_size=page_size, max_num_batched_tokens=64)
    core.submit(make_request(core, [1] * prompt_len, GenerationConfig(max_new_tokens=40)))
    for k in range(1, 40):
        core.step()
        used = core.stats().num_pages - core.stats().num_free_pages
        assert used == -(-(prompt_len + k - 1) // page_size)
    core.step()
    assert core.stats().num_free_pages == core.stats().num_pages


@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("answer_len", [31, 40, 97])
def test_second_turn_of_a_long_chat_prefills_the_new_tokens_only(
    page_size: int, answer_len: int
) -> None:
    """800 tokens, an answer, 25 tokens more: the new ones and at most page - 1 are computed."""
    core = make_fake_core(
        vocab_size=1000, num_pages=2048 // page_size, page_size=page_size, max_model_len=1024,
        max_num_batched_tokens=300,
    )  # fmt: skip
    runner = core._runner
    assert isinstance(runner, FakeRunner)
    first = [(7 * i) % 1000 for i in range(800)]
    config = GenerationConfig(max_new_tokens=answer_len)
    core.submit(make_request(core, first, config, request_id="first"))
    chat = [*first, *run_to_end(core)["first"], *range(25)]
    runner.batches.clear()
    core.submit(make_request(core, chat, GenerationConfig(max_new_tokens=1)))
    run_to_end(core)
    num_slots = 2048 // page_size * page_size
    computed = sum(int((b.slot_mapping < num_slots).sum()) for b in runner.batches)
    # The answer's last token was never fed back, so it is new as well.
    num_new, num_known = 25 + 1, 800 + answer_len - 1
    assert computed == num_new + num_known % page_size
    assert computed <= num_new + page_size - 1
