"""What the documents say of files and flags is so, and README.md counts its first reading right."""

import re
from pathlib import Path

import click
import pytest
import typer

from benchmarks.card import RUNS, arguments_of
from swiftjax.cli import app
from tests.count_lines import ROOT, count, first_reading

DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")]
FOLDERS = ("swiftjax", "kernels", "converters", "serving", "tests", "benchmarks", "examples")
COMMANDS = typer.main.get_command(app)
# `swiftjax bench offline ... --small`, in a block or in a line
CALL = re.compile(r"\bswiftjax ((?:bench )?[a-z]+)((?:\\\n|[^`\n|#])*)")


def flags_of(command: str) -> set[str]:
    """Every flag of a command such as "bench offline"."""
    found = COMMANDS
    for name in command.split():
        assert isinstance(found, click.Group) or hasattr(found, "commands"), command
        found = found.commands[name]  # type: ignore[union-attr]
    return {flag for param in found.params for flag in (*param.opts, *param.secondary_opts)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_have_the_flags_that_are_written(path: Path) -> None:
    for command, arguments in CALL.findall(path.read_text()):
        if command.split()[0] not in COMMANDS.commands:  # type: ignore[attr-defined]
            continue  # prose
        flags = re.findall(r"(?<![\w-])--[a-z][\w-]*", arguments)
        assert set(flags) <= flags_of(command) | {"--help"}, f"swiftjax {command}"


@pytest.mark.parametrize("name", RUNS)
def test_the_runs_on_a_card_are_commands(name: str) -> None:
    start, module, first, *rest = arguments_of(RUNS[name], ROOT)[1:]
    assert start == "-m"
    if module == "swiftjax.cli":
        assert first == "bench"
        with COMMANDS.commands["bench"].commands[rest[0]].make_context(rest[0], rest[1:]):  # type: ignore[attr-defined]
            return
    assert module == "pytest" or (ROOT / f"{module.replace('.', '/')}.py").is_file()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(path: Path) -> None:
    known = [f"/{p.relative_to(ROOT)}" for folder in FOLDERS for p in (ROOT / folder).rglob("*.*")]
    for name in set(re.findall(r"`([\w/]+\.(?:py|proto))`", path.read_text())):
        assert any(file.endswith(f"/{name}") for file in known), name


def test_the_first_reading_is_as_long_as_it_says() -> None:
    rows = re.findall(
        r"^\| \[([\w/.]+)\]\(\1\) \| (\d+) \|", (ROOT / "README.md").read_text(), re.M
    )
    assert [ROOT / name for name, _ in rows] == first_reading() != []
    for name, lines in rows:
        assert abs(count(ROOT / name) - int(lines)) <= 0.1 * int(lines), name
    assert sum(map(count, first_reading())) <= 2200
