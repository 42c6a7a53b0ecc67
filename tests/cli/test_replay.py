"""`swiftjax replay` on the trace that is committed with the examples, and without one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from swiftjax.engine.request import GenerationConfig
from tests.cli.conftest import Cli, assert_one_clear_line
from tests.fakes import make_fake_core, make_request, run_to_end, trace_core

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "examples" / "smollm2.trace.jsonl"
MY_POLICY = f"{ROOT}/examples/my_policy.py:soonest_due"


def test_policies_are_compared_in_a_table_in_json_and_in_a_plot(cli: Cli, tmp_path: Path) -> None:
    out = ["--json", tmp_path / "out.json", "--plot", tmp_path / "out.svg"]
    result = cli("replay", TRACE, "--policy", "fcfs", "--policy", MY_POLICY, *out)
    assert result.returncode == 0, result.stderr
    assert "cost model in seconds" in result.stderr
    for word in ("goodput", "first token", "fcfs", "soonest_due"):
        assert word in result.stdout
    figures = json.loads((tmp_path / "out.json").read_text())
    assert [p["policy"] for p in figures["policies"]] == ["fcfs", "soonest_due"]
    assert figures["goal"] == {"ttft": 0.5, "inter_token": 0.03}
    for one in figures["policies"]:
        assert one["answered"] + one["aborted"] == one["requests"] > 10
        assert 0 <= one["waiting"]["p50"] <= one["ttft"]["p50"] <= one["ttft"]["p99"]
    assert (tmp_path / "out.svg").read_text().startswith("<?xml")


def test_whether_the_scheduler_plans_what_it_planned(cli: Cli, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    core = make_fake_core()
    tracer = trace_core(core, trace)
    core.submit(make_request(core, [1] * 9, GenerationConfig(max_new_tokens=5)))
    run_to_end(core)
    tracer.close()
    result = cli("replay", trace, "--cost-model", "recorded")
    assert (result.returncode, result.stdout) == (0, "5 of 5 steps planned as recorded\n")
    trace.write_text(trace.read_text().replace('"who":[[0,0,9', '"who":[[0,0,8'))
    changed = cli("replay", trace, "--cost-model", "recorded", "--policy", "fcfs")
    assert (changed.returncode, changed.stdout) == (1, "4 of 5 steps planned as recorded\n")
    trace.write_text(trace.read_text().replace('"policy":"fcfs"', '"policy":"mine"'))
    unknown = cli("replay", trace, "--cost-model", "recorded")
    assert unknown.returncode == 2
    assert_one_clear_line(unknown, "'mine'", "--policy path/to/file.py:function")
    resized = cli("replay", trace, "--cost-model", "recorded", "--max-num-seqs", "2")
    assert resized.returncode == 2
    assert_one_clear_line(resized, "leave out sizes")


def test_drawn_requests_need_no_trace_and_all_policies_are_compared(
    cli: Cli, tmp_path: Path
) -> None:
    sizes = ["--max-num-seqs", "8", "--page-size", "32", "--max-total-token-num", "4096"]
    out = ["--json", tmp_path / "out.json", "--ttft-goal", "2", "--inter-token-goal", "0.1"]
    result = cli("replay", "--synthetic", "poisson:30", "--requests", "30", *sizes, *out)
    assert (result.returncode, result.stderr) == (0, "")
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["goal"] == {"ttft": 2.0, "inter_token": 0.1}
    assert figures["sizes"] == {
        "max_num_seqs": 8, "max_num_batched_tokens": 2048, "page_size": 32, "num_pages": 128,
    }  # fmt: skip
    names = {p["policy"] for p in figures["policies"]}
    assert names == {"fcfs", "priority", "shortest-first", "short-before-long", "fair"}
    assert all(p["answered"] == 30 for p in figures["policies"])


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def other(request, state): return 0", ["no function 'key'"]),
        ("def key(request): return 0", ["two arguments", "(request, state)"]),
        ("key = 3", ["no function 'key'"]),
    ],
)
def test_a_file_without_the_policy_is_told(
    cli: Cli, code: str, words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(code)
    result = cli("replay", TRACE, "--policy", f"{tmp_path}/mine.py:key")
    assert (result.returncode, result.stdout) == (2, "")
    assert_one_clear_line(result, "mine.py", *words)


def test_neither_jax_nor_a_plot_library_is_needed() -> None:
    code = (
        "import sys\n"
        "sys.modules['jax'] = sys.modules['matplotlib'] = None\n"
        "from swiftjax.cli import app\n"
        f"args = ['replay', {str(TRACE)!r}, '--policy', 'fcfs']\n"
        "app(args, standalone_mode=False)\n"
        "try:\n"
        "    app([*args, '--plot', 'out.png'])\n"
        "except SystemExit as error:\n"
        "    print('exit', error.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("exit 2\n")
    assert "pip install 'swiftjax[plot]'" in done.stderr
