"""Print lines of code per part and of the first reading, and name what is over the house limits.

The limits are what readers enjoy, not gates: the exit code is always 0. A function counts without
its signature, which for a command is the list of its options.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = {
    "engine": "swiftjax/engine", "model": "swiftjax/model", "kernels": "kernels",
    "converters": "converters", "serving": "serving", "cli": "swiftjax/cli",
    "replay": "swiftjax/replay", "evaluation": "swiftjax/evaluation", "bench": "swiftjax/bench",
    "root": "swiftjax", "benchmarks": "benchmarks", "tests": "tests",
}  # fmt: skip
NOT_PRODUCT = ("benchmarks", "tests")
MAX_FILE, MAX_FUNCTION = 250, 40


def main() -> None:
    """Count every part once."""
    total = 0
    for part, folder in PARTS.items():
        pattern = "*.py" if part == "root" else "**/*.py"
        files = [p for p in sorted((ROOT / folder).glob(pattern)) if "_pb2" not in p.name]
        lines = {path: count(path) for path in files}
        print(f"{part:<11}{sum(lines.values()):>7} lines in {len(files)} files")
        if part != "tests":
            report_large(lines)
        total += 0 if part in NOT_PRODUCT else sum(lines.values())
    print(f"{'all':<11}{total:>7} lines without benchmarks and tests")
    reading = first_reading()
    print(f"{'to read':<11}{sum(map(count, reading)):>7} lines in {len(reading)} files (README.md)")


def count(path: Path) -> int:
    """Lines of a file."""
    return len(path.read_text().splitlines())


def first_reading() -> list[Path]:
    """The files that README.md names to be read first, each in a row of its own."""
    section = (ROOT / "README.md").read_text().partition("## Read first")[2].partition("\n## ")[0]
    return [ROOT / name for name in re.findall(r"^\| \[([\w/.]+)\]", section, re.MULTILINE)]


def report_large(lines: dict[Path, int]) -> None:
    """Name what is over the limits."""
    for path, length in lines.items():
        if length > MAX_FILE:
            print(f"    {path.relative_to(ROOT)}: {length} lines (limit {MAX_FILE})")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.body[0].lineno + 1
                if length > MAX_FUNCTION:
                    print(f"    {path.relative_to(ROOT)}: {node.name} has {length} lines")


if __name__ == "__main__":
    main()
