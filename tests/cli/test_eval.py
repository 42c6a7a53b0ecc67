"""`swiftjax eval` on a tiny model."""

import json
from pathlib import Path

from tests.cli.conftest import Cli, assert_one_clear_line


def test_eval_command(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat; " * 20)
    options = ["--text", text, "--context", "32", "--tokens", "128", "--quiet"]
    plot, out = tmp_path / "plot.png", tmp_path / "results"
    result = cli(
        "eval", tiny, "--baseline", tiny, "--quant-type", "int4", "--json", *options,
        "--plot", plot, "--out", out,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["num_tokens"] == 4 * 31 and found["quant_type"] == "int4"
    assert found["divergence"] > 0 and found["perplexity_change"] != 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    (record,) = json.loads((out / "cpu" / "quality.json").read_text())
    assert record["value"] == round(found["perplexity"], 4) and record["model"] == "tiny"
    refused = cli("eval", tiny, *options[:2], "--context", "512")
    assert refused.returncode == 2
    assert_one_clear_line(refused, "512", "256")
