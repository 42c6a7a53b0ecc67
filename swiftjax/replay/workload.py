"""What a replay runs: requests with their arrival times and lengths, and the engine they meet.

Read from a trace (`trace_file.py`) or drawn here. Requests hold no real tokens, only stand-ins that
are equal where the recorded prefixes were. Knows no clock.
"""

import random
from dataclasses import dataclass, replace
from typing import NamedTuple

from swiftjax.config import QueuePolicyChoice, SchedulerConfig
from swiftjax.engine.observer import Command
from swiftjax.engine.policies import victim_policy_for
from swiftjax.engine.preemption import PreemptionCosts
from swiftjax.engine.request import GenerationConfig, Request, RequestOptions
from swiftjax.errors import InvalidRequestError

STOP = -1  # the stand-in for a stop token
PROMPT_LENS, OUTPUT_LENS = (64, 512), (64, 256)
CLIENT_SHARES = (8, 4, 2, 1)
NUM_PRIORITIES = 3
RECOMPUTE = PreemptionCosts()


class Moment(NamedTuple):
    """When something took effect: seconds since the start, and the step planned next."""

    time: float
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StandIns:
    """For the tokens of one request: one value per known page, then a value of its own."""

    number: int
    page_size: int
    labels: tuple[int, ...]

    def token(self, position: int) -> int:
        """The stand-in for the token at a position."""
        page = position // self.page_size
        return self.labels[page] if page < len(self.labels) else STOP - 1 - self.number

    def first(self, count: int) -> tuple[int, ...]:
        """The stand-ins for the first `count` tokens."""
        known = min(count, len(self.labels) * self.page_size)
        own = (self.token(known),) * (count - known) if count > known else ()
        return (*(self.token(position) for position in range(known)), *own)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """One request, and what became of it where that is known."""

    request: Request
    stand_ins: StandIns
    submitted: Moment
    output_len: int | None = None  # where the model ended the answer; None: at max_new_tokens


class ToldTo(NamedTuple):
    """A request, by its place among the arrivals, was told something."""

    moment: Moment
    what: Command
    number: int


class RecordedStep(NamedTuple):
    """A step as a trace has it; `who` lists (request, start, tokens, samples)."""

    time: float
    took: float
    in_flight: bool  # it was planned while the step before it was not read yet
    who: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """All requests, in the order of submission, and the sizes of the engine."""

    config: SchedulerConfig
    page_size: int
    num_pages: int
    arrivals: tuple[Arrival, ...]
    costs: PreemptionCosts = RECOMPUTE
    commands: tuple[ToldTo, ...] = ()
    steps: tuple[RecordedStep, ...] = ()

    @property
    def overlaps(self) -> bool:
        """Whether steps were planned while others ran."""
        return any(step.in_flight for step in self.steps)

    def with_policy(self, policy: QueuePolicyChoice) -> "Workload":
        """The same under another queue policy, with the victims that go with it."""
        victim = victim_policy_for(policy)
        return replace(self, config=replace(self.config, policy=policy, victim_policy=victim))

    def resized(
        self,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        page_size: int | None = None,
        max_total_token_num: int | None = None,
    ) -> "Workload":
        """The same for an engine of other sizes; None keeps one."""
        config = self.config
        page_size = page_size or self.page_size
        tokens = max_total_token_num or self.num_pages * self.page_size
        return replace(
            self,
            config=replace(
                config,
                max_num_seqs=max_num_seqs or config.max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens or config.max_num_batched_tokens,
            ),
            page_size=page_size,
            num_pages=-(-tokens // page_size),
        )

    @property
    def max_pages(self) -> int:
        """Pages of the longest request."""
        requests = [arrival.request for arrival in self.arrivals]
        longest = max((len(r.prompt_token_ids) + r.max_new_tokens for r in requests), default=1)
        return -(-longest // self.page_size)


def make_arrival(
    stand_ins: StandIns,
    *,
    prompt_len: int,
    max_new_tokens: int,
    submitted: Moment,
    arrival: float,
    output_len: int | None = None,
    deadline: float | None = None,
    options: RequestOptions | None = None,
    scores_prompt: bool = False,
    fork_of: int | None = None,
) -> Arrival:
    """A request made of stand-ins; it ends by a stop token after `output_len` tokens if given."""
    request = Request(
        request_id=str(stand_ins.number),
        prompt_token_ids=stand_ins.first(prompt_len),
        generation=GenerationConfig(prompt_logprobs=0 if scores_prompt else None),
        max_new_tokens=max_new_tokens,
        stop_token_ids=frozenset([STOP]),
        seed=0,
        arrival_time=arrival,
        deadline=deadline,
        options=options or RequestOptions(),
        fork_of=None if fork_of is None else str(fork_of),
    )
    return Arrival(request=request, stand_ins=stand_ins, submitted=submitted, output_len=output_len)


def draw(kind: str, count: int, seed: int) -> tuple[Arrival, ...]:
    """Draw requests: "poisson:8" is 8 a second on average; the lengths are those of W3.

    Four clients ask 8 : 4 : 2 : 1; one request in three has priority 1, one priority 2. Raises
    InvalidRequestError for a kind that does not exist.
    """
    rate = _poisson_rate(kind)
    rng = random.Random(seed)
    prompt_lens = [rng.randint(*PROMPT_LENS) for _ in range(count)]
    output_lens = [rng.randint(*OUTPUT_LENS) for _ in range(count)]
    now, arrivals = 0.0, []
    for number in range(count):
        now += rng.expovariate(rate)
        [client] = rng.choices(range(len(CLIENT_SHARES)), CLIENT_SHARES)
        priority = rng.randrange(NUM_PRIORITIES)
        arrivals.append(
            make_arrival(
                StandIns(number=number, page_size=1, labels=()),
                prompt_len=prompt_lens[number],
                max_new_tokens=output_lens[number],
                submitted=Moment(now, 0),
                arrival=now,
                options=RequestOptions(client_id=f"client {client}", priority=priority),
            )
        )
    return tuple(arrivals)


def _poisson_rate(kind: str) -> float:
    name, _, number = kind.partition(":")
    try:
        rate = float(number)
    except ValueError:
        rate = 0.0
    if name != "poisson" or not 0 < rate < float("inf"):
        raise InvalidRequestError(
            f"{kind!r} is no kind of arrivals; write poisson:8 for 8 requests a second"
        )
    return rate
