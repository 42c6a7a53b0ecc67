"""What a trace holds, that it is whole after a clean end and after a kill, and nobody's text."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swiftjax.engine.core import EngineCore
from swiftjax.engine.observer import Observer
from swiftjax.engine.preemption import PreemptionCosts
from swiftjax.engine.request import GenerationConfig
from swiftjax.engine.tracer import Tracer, check_writable
from swiftjax.errors import InvalidRequestError
from tests.fakes import make_fake_core, make_request, trace_core

CRASH = """
import sys
from pathlib import Path
from tests.fakes import make_fake_core, make_request, trace_core
from swiftjax.engine.request import GenerationConfig
core = make_fake_core(num_pages=4096, max_num_seqs=64, max_num_batched_tokens=128)
tracer = trace_core(core, Path(sys.argv[1]))
print("ready", flush=True)
while True:
    core.submit(make_request(core, [1, 2, 3] * 20, GenerationConfig(max_new_tokens=20)))
    core.step()
"""


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def of_kind(path: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in lines_of(path) if line["kind"] == kind]


def run(core: EngineCore) -> None:
    while core.has_work:
        core.step()


def test_lines_of_a_small_run(tmp_path: Path) -> None:
    now = [10.0]
    core = make_fake_core(max_num_batched_tokens=8, clock=lambda: now[0])
    tracer = trace_core(core, tmp_path / "trace")
    assert isinstance(tracer, Observer)
    config = GenerationConfig(max_new_tokens=3)
    core.submit(make_request(core, [1] * 10, config, request_id="a", client_id="me", priority=2))
    core.submit(make_request(core, [7] * 3, config, request_id="b", deadline=50.0))
    now[0] = 11.0
    core.step()
    core.abort("b")
    core.abort("nobody")
    now[0] = 11.5
    run(core)
    tracer.close()
    header, first, second, *rest = lines_of(tmp_path / "trace")
    assert (header["kind"], header["version"]) == ("swiftjax-trace", 1)
    assert (header["page_size"], header["num_pages"]) == (4, 64)
    assert (header["scheduler"]["policy"], header["scheduler"]["max_num_seqs"]) == ("fcfs", 4)
    assert (first["n"], first["id"], first["prompt_len"], first["step"]) == (0, "a", 10, 0)
    assert (first["client_id"], first["priority"], first["max_new_tokens"]) == ("me", 2, 3)
    assert len(first["pages"]) == 16 and not second["pages"]  # two full pages, none
    assert second["deadline"] == 40.0
    steps = [line for line in rest if line["kind"] == "step"]
    assert [s["step"] for s in steps] == [0, 1, 2, 3]
    assert steps[0]["who"] == [[0, 0, 8, 0]]
    assert steps[1]["who"] == [[0, 8, 2, 1]]
    assert (steps[0]["t"], steps[0]["took"]) == (1.0, 0.0)
    assert steps[0]["pages"] == {"used": 2, "free": 62, "idle": 0}
    assert steps[0]["queue"] == {"running": 1, "waiting": 1, "preempted": 0}
    finishes = [line for line in rest if line["kind"] == "finish"]
    assert [(f["n"], f["reason"], f["output_len"]) for f in finishes] == [
        (1, "abort", 0),
        (0, "length", 3),
    ]
    [abort] = [line for line in rest if line["kind"] == "abort"]
    assert abort == {"kind": "abort", "n": 1, "t": 1.0, "step": 1}


def test_pages_tell_who_shares_a_prefix_and_nothing_else(tmp_path: Path) -> None:
    core = make_fake_core(page_size=4)
    tracer = trace_core(core, tmp_path / "trace")
    config = GenerationConfig(max_new_tokens=6)
    prompts = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 2, 3, 4, 5, 6, 7, 8]]
    for prompt, salt in [*((p, "") for p in prompts), (prompts[0], "other tenant")]:
        core.submit(make_request(core, prompt, config, cache_salt=salt))
    run(core)
    tracer.close()
    a, b, c, d = [line["pages"] for line in of_kind(tmp_path / "trace", "submit")]
    assert (len(a), len(b), len(c)) == (8, 16, 16)
    assert b[:8] == a and len({a, c[:8], d, b[8:], c[8:]}) == 5
    # The answer counts up, so the first one's second page becomes that of the second prompt.
    ends = {line["n"]: line["pages"] for line in of_kind(tmp_path / "trace", "finish")}
    assert ends[0][:8] == b[8:] and len(ends[0]) == 16
    assert "prompt_token" not in (tmp_path / "trace").read_text()


def test_preemption_and_moves_are_told(tmp_path: Path) -> None:
    costs = PreemptionCosts(host_pages=8, seconds_per_page=1.0, seconds_per_token=0.55)
    core = make_fake_core(num_pages=8, page_size=4, max_model_len=32, costs=costs)
    tracer = trace_core(core, tmp_path / "trace")
    for i in range(4):
        core.submit(make_request(core, [i] * 7, GenerationConfig(max_new_tokens=14)))
    run(core)
    tracer.close()
    steps = of_kind(tmp_path / "trace", "step")
    assert sum(s["preemptions"] for s in steps) == core.scheduler.num_preemptions > 0
    moved_out, moved_back = ([m for s in steps for m in s[way]] for way in ("out", "back"))
    assert moved_out and sorted(moved_out) == sorted(moved_back)
    for s in steps:
        assert sum(s["pages"].values()) == 8


def test_lines_are_whole_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    process = subprocess.Popen(
        [sys.executable, "-c", CRASH, str(path)], stdout=subprocess.PIPE, env=dict(os.environ)
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        while path.stat().st_size < 100_000:
            assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
    *whole, rest = path.read_text().split("\n")
    assert rest == ""
    assert len([json.loads(line) for line in whole]) > 100


def test_lines_are_there_when_the_process_ends(tmp_path: Path) -> None:
    code = CRASH.replace("while True", "for _ in range(50)")
    path = tmp_path / "trace"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True)
    assert len(of_kind(path, "step")) == len(of_kind(path, "submit")) == 50


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="cannot write the trace"):
        Tracer(tmp_path / "no" / "trace", make_fake_core().scheduler)
    with pytest.raises(InvalidRequestError, match="cannot write the trace"):
        check_writable(tmp_path / "no" / "trace")
    (tmp_path / "trace").write_text("of yesterday")
    check_writable(tmp_path / "trace")
    assert (tmp_path / "trace").read_text() == "of yesterday"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_ends_the_trace_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    core = make_fake_core()
    tracer = trace_core(core, Path("/dev/full"))
    core.submit(make_request(core, [1, 2], request_id="a"))
    run(core)
    tracer.close()
    assert "the trace ends here" in caplog.text
