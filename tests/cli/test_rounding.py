"""`swiftjax convert` with a calibration text."""

from pathlib import Path

from tests.cli.conftest import Cli, assert_one_clear_line


def test_convert_by_a_text(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "the cat sat on the mat"}\n' * 40)
    options = ["--quant-type", "int4", "--method", "gptq", "--group-size", "32", "--symmetric"]
    made = cli("convert", tiny, tmp_path / "small", *options, "--calib", text)
    assert made.returncode == 0, made.stderr
    assert "int4" in made.stderr
    alone = cli("convert", tiny, tmp_path / "other", "--method", "gptq", "--calib", text)
    assert_one_clear_line(alone, "--quant-type")


def test_options_that_would_do_nothing_are_refused(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    refused = {
        "--group-size 64 is for int4, and --quant-type is int8": ["int8", "--group-size", "64"],
        "--group-size 64 is for int4, and --quant-type is none": ["none", "--group-size", "64"],
        "--symmetric is for int4, and --quant-type is fp8": ["fp8", "--symmetric"],
        "--keep says what is not quantised, and nothing is": ["bf16", "--keep", "head"],
        "--keep '*.downs' is the name of no projection": ["int8", "--keep", "*.downs"],
    }
    for told, options in refused.items():
        made = cli("convert", tiny, tmp_path / "x", "--quant-type", *options)
        assert_one_clear_line(made, told)
    kept = ["--quant-type", "int8", "--keep", "head", "--keep", "layers.0.*"]
    assert cli("convert", tiny, tmp_path / "x", *kept).returncode == 0
