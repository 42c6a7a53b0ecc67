"""Print lines of code per part, and name files and functions over the house limits.

The limits are what readers enjoy, not gates: the exit code is always 0.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = {
    "engine": "swiftjax/engine", "model": "swiftjax/model", "kernels": "kernels",
    "converters": "converters", "serving": "serving", "cli": "swiftjax/cli",
    "replay": "swiftjax/replay", "evaluation": "swiftjax/evaluation", "root": "swiftjax",
    "tests": "tests",
}  # fmt: skip
MAX_FILE, MAX_FUNCTION = 250, 40


def main() -> None:
    """Count every part once."""
    total = 0
    for part, folder in PARTS.items():
        pattern = "*.py" if part == "root" else "**/*.py"
        files = [p for p in sorted((ROOT / folder).glob(pattern)) if "_pb2" not in p.name]
        lines = {path: len(path.read_text().splitlines()) for path in files}
        print(f"{part:<11}{sum(lines.values()):>7} lines in {len(files)} files")
        if part != "tests":
            total += sum(lines.values())
            report_large(lines)
    print(f"{'all':<11}{total:>7} lines without tests")


def report_large(lines: dict[Path, int]) -> None:
    """Name what is over the limits."""
    for path, count in lines.items():
        if count > MAX_FILE:
            print(f"    {path.relative_to(ROOT)}: {count} lines (limit {MAX_FILE})")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > MAX_FUNCTION:
                    print(f"    {path.relative_to(ROOT)}: {node.name} has {length} lines")


if __name__ == "__main__":
    main()
