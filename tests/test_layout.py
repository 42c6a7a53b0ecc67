"""The repository's shape: links, import direction, and what importing a part may load."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("kernels", "converters", "serving")

# A module may import its own level's package and everything below; engine and model are siblings.
LEVELS = {
    "batch": 0, "config": 0, "model_config": 0, "errors": 0, "memory": 0, "hf_config": 0,
    "hf_rope": 0, "quantization": 0, "disk": 0, "garbage": 0, "shapes": 0, "tokenizer_files": 0,
    "kernels": 1,
    "engine": 2, "model": 2,
    "converters": 3, "replay": 3,
    "api": 4, "async_api": 4, "build": 4, "build_scheduler": 4, "kernel_choice": 4,
    "sessions": 4, "sizing": 4, "weight_swap": 4,
    "bench": 5, "evaluation": 5, "serving": 5,
    "cli": 6,
}  # fmt: skip
SIBLINGS = {frozenset(("engine", "model"))}
# The transports are handed an engine; they never build one or touch the device.
FORBIDDEN = {"serving": {"api", "build", "model", "kernels", "converters"}}
JAX_ALLOWED = {
    "kernels", "model", "converters", "build", "kernel_choice", "sizing", "api", "bench",
    "evaluation", "cli",
}  # fmt: skip


def python_files() -> list[Path]:
    """Every tracked-looking Python file, each once (links are not followed)."""
    found = []
    for folder in ("swiftjax", *LINKED, "tests", "examples", "benchmarks"):
        for base, dirs, files in os.walk(ROOT / folder):
            dirs[:] = [d for d in dirs if d != "__pycache__" and not (Path(base) / d).is_symlink()]
            found += [Path(base) / name for name in files if name.endswith(".py")]
    return found


def imported_modules(path: Path) -> list[str]:
    """Dotted names of everything a file imports, function-level imports included."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def part_of(path: Path) -> str | None:
    """The part of swiftjax a file belongs to, or None for tests, examples and the like."""
    parts = path.relative_to(ROOT).parts
    if parts[0] in LINKED:
        return parts[0]
    if parts[0] != "swiftjax" or parts[1] == "__init__.py":
        return None
    return Path(parts[1]).stem


@pytest.mark.parametrize("name", LINKED)
def test_folder_is_a_relative_link(name: str) -> None:
    link = ROOT / "swiftjax" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert (ROOT / name / "__init__.py").is_file()


def test_no_module_imports_a_top_level_folder() -> None:
    # `import kernels` would work from the root and give a second copy of every module.
    for path in python_files():
        tops = {name.split(".")[0] for name in imported_modules(path)}
        assert not tops & set(LINKED), path


def test_imports_point_downward() -> None:
    wrong = []
    for path in python_files():
        part = part_of(path)
        if part is None:
            continue
        for name in imported_modules(path):
            pieces = name.split(".")
            if pieces[0] != "swiftjax" or len(pieces) < 2 or pieces[1] == part:
                continue
            target = pieces[1]
            if target not in LEVELS:
                continue  # a name re-exported by swiftjax itself
            upward = LEVELS[target] > LEVELS[part]
            if upward or frozenset((part, target)) in SIBLINGS or target in FORBIDDEN.get(part, ()):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, wrong


def test_only_the_data_plane_imports_jax() -> None:
    for path in python_files():
        part = part_of(path)
        if part is not None and part not in JAX_ALLOWED:
            tops = {name.split(".")[0] for name in imported_modules(path)}
            assert not tops & {"jax", "flax", "jaxlib"}, path
            assert not tops & {"torch", "transformers"}, path


@pytest.mark.parametrize(
    "module", ["swiftjax", "swiftjax.engine.scheduler", "swiftjax.engine.async_engine"]
)
def test_control_plane_loads_no_jax(module: str) -> None:
    code = f"import sys, {module}; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_links_of_the_documents_lead_somewhere() -> None:
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")):
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_p13_nothing_loads_or_runs_code_that_came_as_data() -> None:
    banned = {"pickle", "marshal", "dill", "cloudpickle", "torch"}
    for path in python_files():
        if part_of(path) is not None:
            assert not {n.split(".")[0] for n in imported_modules(path)} & banned, path
            calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
            names = {c.func.id for c in calls if isinstance(c.func, ast.Name)}
            assert not names & {"eval", "exec"}, path
            keywords = {keyword.arg for call in calls for keyword in call.keywords}
            assert not keywords & {"shell", "trust_remote_code"}, path
