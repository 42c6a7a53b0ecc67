"""Sessions at random over a runner that reads every page: a turn goes on as if nothing had been."""

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest

from swiftjax.engine.checks import check_label
from swiftjax.engine.core import EngineCore
from swiftjax.engine.kept_pages import SESSION_KEY, KeptLimits
from swiftjax.engine.request import GenerationConfig
from swiftjax.engine.session_pages import SavedPages
from swiftjax.engine.streaming import Streaming
from swiftjax.errors import InvalidRequestError
from tests.fakes import ContextRunner, LossyRunner, context_oracle, make_fake_core, make_request

VOCAB, PAGES, PAGE = 50, 60, 4
KINDS = (Streaming(sink=4, window=13), Streaming(sink=0, window=1), None)


@dataclass
class Talk:
    """The text of one session, and what its turn has given so far."""

    name: str
    streaming: Streaming | None
    tokens: list[int]
    request_id: str = ""  # of a turn under way
    want: tuple[int, ...] = ()


class Talks:
    """Drives several sessions on one core."""

    def __init__(self, core: EngineCore, limits: KeptLimits, draw: random.Random) -> None:
        self.limits = limits
        self.core, self.draw, self.count = core, draw, 0
        self.talks: list[Talk] = []
        self.num_forked = self.num_turns = self.num_cached = 0

    def open(self) -> None:
        self.count += 1
        self.talks.append(Talk(f"s{self.count}", self.draw.choice(KINDS), []))

    def act(self, talk: Talk) -> None:
        draw, core = self.draw, self.core
        match draw.randrange(10):
            case 0 if len(self.talks) < 8:
                self.count += 1
                core.sessions.fork(talk.name, f"s{self.count}")
                self.talks.append(replace(talk, name=f"s{self.count}", tokens=list(talk.tokens)))
                self.num_forked += 1
            case 1:
                core.sessions.close(talk.name)
                self.talks.remove(talk)
            case 2:  # to another process and back
                saved = core.sessions.save(talk.name, talk.tokens)
                core.sessions.close(talk.name)
                core.sessions.load(talk.name, saved, talk.tokens, talk.streaming)
            case 3:  # behind a stop string that was noticed late
                del talk.tokens[len(talk.tokens) - draw.randrange(12) :]
            case _:
                self.begin_turn(talk)

    def begin_turn(self, talk: Talk) -> None:
        draw, core = self.draw, self.core
        most = 200 if talk.streaming else 40
        added = [draw.randrange(3) for _ in range(draw.randrange(0 if talk.tokens else 1, 30))]
        if len(talk.tokens) + len(added) + 1 >= most:
            core.sessions.close(talk.name)
            self.talks.remove(talk)
            return
        talk.tokens += added
        config = GenerationConfig(max_new_tokens=draw.randrange(1, 25), streaming=talk.streaming)
        request = make_request(core, talk.tokens, config)
        core.submit(replace(request, session=talk.name))
        talk.request_id = request.request_id
        want = context_oracle(talk.tokens, request.max_new_tokens, VOCAB, 0, talk.streaming)
        talk.want = tuple(want)
        self.num_turns += 1

    def step(self) -> None:
        by_id = {talk.request_id: talk for talk in self.talks}
        for output in self.core.step():
            talk = by_id[output.request_id]
            count = len(output.token_ids)
            assert output.token_ids == talk.want[:count]
            talk.want = talk.want[count:]
            talk.tokens += output.token_ids
            if output.finish_reason is not None:
                assert output.finish_reason == "abort" or not talk.want
                talk.request_id = ""
                self.num_cached += output.num_cached_tokens
        self.core.scheduler.check_integrity()
        kept = self.core.scheduler.kept
        assert kept.num_on_device <= self.limits.device_pages
        assert kept.num_stored <= self.limits.stored_pages
        assert kept.num_on_device == len(list(kept.owned_pages()))


@pytest.mark.parametrize("overlaps", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("seed", range(3))
def test_a_turn_goes_on_as_if_nothing_had_been(seed: int, overlaps: bool) -> None:
    draw = random.Random(seed)
    """Copies that are lost, by a disk that is full, are no more than computed again."""
    runner = (LossyRunner if seed == 1 else ContextRunner)(VOCAB, PAGES, PAGE)
    limits = [KeptLimits(30, 40), KeptLimits(0, 60), KeptLimits(60, 0)][seed]
    core = make_fake_core(
        vocab_size=VOCAB, num_pages=PAGES, page_size=PAGE, max_model_len=160,
        max_num_batched_tokens=draw.choice([7, 40]), prefix_cache=seed != 1,
        runner=runner, overlaps=overlaps, streams=True, kept=limits,
    )  # fmt: skip
    talks = Talks(core, limits, draw)
    for _ in range(300):
        if len(talks.talks) < 5:
            talks.open()
        some = draw.choice(talks.talks)
        if not some.request_id:
            talks.act(some)
        elif draw.randrange(30) == 0:
            core.abort(some.request_id)
        elif draw.randrange(20) == 0:
            core.scheduler.preemption.preempt_next()
        talks.step()
    assert talks.num_turns > 20 and talks.num_forked > 2 and talks.num_cached > 200
    assert core.scheduler.num_preemptions > 1
    while core.has_work:
        talks.step()
    for talk in talks.talks:
        core.sessions.close(talk.name)
    core.submit(make_request(core, [1]))  # its step carries the last moves out
    while core.has_work:
        core.step()
    assert core.stats().num_free_pages == PAGES and not runner.host


def test_more_pages_than_a_sequence_may_own_are_not_taken_from_a_file() -> None:
    """A forged file says that nothing was given back behind the sinks of a long text."""
    runner = ContextRunner(VOCAB, PAGES, PAGE)
    core = make_fake_core(
        vocab_size=VOCAB, num_pages=PAGES, page_size=PAGE, max_model_len=160, runner=runner,
        streams=True, kept=KeptLimits(30, 90),
    )  # fmt: skip
    tokens, streaming = [1] * 300, Streaming(sink=4, window=13)
    chunks = (np.zeros((75, PAGE), np.int32),)
    saved = SavedPages(runner.fingerprint(), PAGE, 299, 0, "", 75, chunks)
    core.sessions.load("s", saved, tokens, streaming)
    config = GenerationConfig(max_new_tokens=5, streaming=streaming)
    core.submit(replace(make_request(core, tokens, config), session="s"))
    found: list[int] = []
    for _ in range(40):
        for output in core.step():
            found += output.token_ids
    assert found == context_oracle(tokens, 5, VOCAB, 0, streaming)


def test_no_request_can_name_the_copy_of_a_session() -> None:
    """Whose pages it would come back with, when it was swapped out."""
    with pytest.raises(InvalidRequestError, match="control character"):
        check_label("request_id", SESSION_KEY)
