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


def test_group_sizes_of_other_formats_are_refused(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    for kind in ("int8", "none"):
        made = cli("convert", tiny, tmp_path / "x", "--quant-type", kind, "--group-size", "64")
        assert_one_clear_line(made, f"--group-size 64 is for int4, and --quant-type is {kind}")
