"""Bookkeeping that must not grow with the number of requests that ever were."""

import math
import random

import pytest

from swiftjax.engine.deadlines import Deadlines
from swiftjax.engine.request import GenerationConfig
from swiftjax.engine.served_tokens import MAX_IDLE_CLIENTS, Served, ServedTokens
from tests.fakes import make_fake_core, make_request, run_to_end


def test_the_earliest_open_deadline_comes_first() -> None:
    rng = random.Random(1)
    deadlines, expected = Deadlines(), {}
    for i in range(500):
        expected[f"r{i}"] = time = rng.uniform(0, 100)
        deadlines.add(f"r{i}", time)
        if i % 3 == 0:
            gone = rng.choice(sorted(expected))
            deadlines.drop(gone)
            del expected[gone]
        assert deadlines.earliest() == min(expected.values(), default=math.inf)
    due = deadlines.pop_due(50.0)
    assert due == sorted((n for n in expected if expected[n] <= 50.0), key=expected.__getitem__)
    assert deadlines.pop_due(50.0) == []


def test_an_id_that_is_used_again_has_its_new_deadline_only() -> None:
    deadlines = Deadlines()
    deadlines.add("a", 1.0)
    deadlines.drop("a")
    deadlines.add("a", 5.0)
    assert deadlines.pop_due(2.0) == []
    assert deadlines.pop_due(5.0) == ["a"]


def test_finished_deadlines_do_not_stay_for_ever() -> None:
    core = make_fake_core()
    for _ in range(120):
        core.submit(make_request(core, [1], GenerationConfig(max_new_tokens=1), deadline=math.inf))
        run_to_end(core)
    assert len(core.scheduler.deadlines) < 70


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_who_left_the_queue_does_not_stay_while_nobody_starts(policy: str) -> None:
    core = make_fake_core(max_num_seqs=1, policy=policy)
    core.submit(make_request(core, [1], GenerationConfig(max_new_tokens=100), priority=1))
    core.step()
    stays = [make_request(core, [10 * i]) for i in range(3)]
    for request in stays:
        core.submit(request)
    for i in range(500):
        core.submit(make_request(core, [1], request_id=f"leaves {i}"))
        core.abort(f"leaves {i}")
    assert len(core.scheduler.sequences.waiting._heap) < 80
    assert list(run_to_end(core))[-3:] == [request.request_id for request in stays]


def test_clients_that_left_are_forgotten_in_time() -> None:
    served = ServedTokens()
    for i in range(MAX_IDLE_CLIENTS + 100):
        served.join(f"client {i}")
        served.leave(f"client {i}")
    assert len(served.tokens) == MAX_IDLE_CLIENTS
    core = make_fake_core(policy="fair")
    for i in range(5):
        core.submit(make_request(core, [1], client_id=f"client {i}"))
    run_to_end(core)
    assert not core.scheduler.served.clients._num_open
    assert not core.scheduler.served.clients._levels
    assert not core.scheduler.served.owners._num_open


def test_a_client_that_stayed_away_starts_where_the_others_are() -> None:
    served = ServedTokens()
    for client in "ab":
        served.join(client)
    served.leave("b")
    for _ in range(10):
        served.start("a")
        served.tokens["a"] += 100
    served.join("b")
    assert served.tokens == {"a": 1000, "b": 900}


def test_a_client_that_took_more_does_not_get_rid_of_it_by_leaving() -> None:
    served = ServedTokens()
    for client in "ab":
        served.join(client)
        served.start(client)
    served.tokens["a"] += 500
    served.leave("a")
    served.join("a")
    assert served.tokens == {"a": 500, "b": 0}


def test_who_asks_little_for_long_has_no_right_to_all_turns_after_it() -> None:
    """One answer that runs all the while is as good as being away."""
    core = make_fake_core(policy="fair", max_num_seqs=2, max_model_len=512, num_pages=1024)

    def submit(client_id: str, num_tokens: int, count: int) -> None:
        for i in range(count):
            name = f"{client_id} {num_tokens} {i}"
            config = GenerationConfig(max_new_tokens=num_tokens)
            core.submit(make_request(core, [1] * 8, config, request_id=name, client_id=client_id))

    submit("little", 500, 1)
    submit("much", 1, 100)
    for _ in range(150):
        core.step()
    assert core.scheduler.num_running == 1 and core.scheduler.num_waiting == 0
    submit("little", 2, 20)
    submit("much", 2, 20)
    clients = [name.split()[0] for name in run_to_end(core)]
    assert 4 <= clients[:10].count("much") <= 6


def _serve(served: Served, client: str, num_tokens: int) -> None:
    served.join(client)
    served.start(client)
    served.charge(client, num_tokens)


def test_a_new_client_starts_where_those_of_its_owner_are() -> None:
    """Another owner's are elsewhere: one who has a single client computes as much for it alone."""
    served = Served()
    for num_tokens in (100, 1):
        for i in range(99):
            _serve(served, f"a/{i}", num_tokens)
        for _ in range(99):
            _serve(served, "b/only", 100)
    served.join("a/new")
    assert served.clients.tokens["a/new"] == 100
    for i in range(1, 99):
        served.leave(f"a/{i}")
        served.leave(f"a/{i}")
    served.join("a/5")
    served.join("a/newer")
    assert served.clients.tokens["a/5"] == 101 and served.clients.tokens["a/newer"] == 100


def test_clients_of_an_owner_that_was_away_are_equal_again() -> None:
    served = Served()
    _serve(served, "a/old", 100)
    served.leave("a/old")
    assert "a" not in served.clients._levels
    _serve(served, "b", 5000)
    _serve(served, "b", 5000)
    for client in ("a/new", "a/old"):
        served.join(client)
        assert served.clients.tokens[client] == 5000


def test_an_owner_of_many_clients_has_one_share() -> None:
    """One that makes a new client for each request, too."""
    core = make_fake_core(policy="fair", max_num_seqs=1)

    def submit(client_id: str) -> None:
        core.submit(make_request(core, [1] * 8, request_id=client_id, client_id=client_id))

    for i in range(8):
        submit(f"many/{i}")
    for i in range(3):
        submit(f"one/{i % 2} {i}")
    ended = run_to_end(core)
    owners = [name.partition("/")[0] for name in ended]
    assert owners[:6].count("one") == 3
