"""The examples and the README's Python code run as they stand, on a tiny model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# One process for all, because starting jax is most of the work.
RUN = """
import runpy, sys
sys.path.insert(0, {root!r})
sys.argv[1:] = ["--model-path", {model!r}, "--max-new-tokens", "12"]
for name in ("offline", "online", "endless_chat"):
    print("#", name)
    runpy.run_path({root!r} + f"/examples/{{name}}.py", run_name="__main__")
print("# readme")
exec({readme!r})
"""


def test_examples_and_readme(tiny: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    [readme] = [block for block in blocks if "Engine(" in block]
    code = RUN.format(
        root=str(ROOT), model=str(tiny), readme=readme.replace("smollm2-135m", str(tiny))
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    _, offline, online, endless, readme = re.split("^# .*\n", done.stdout, flags=re.MULTILINE)
    assert "tokens in" in offline
    assert "num_running=0" in online  # the stream that was left early has ended too
    assert endless.count("tokens of chat") == 12
    assert readme.count("\n") >= 2


@pytest.mark.demo_model
def test_the_data_plane_alone() -> None:
    path = ROOT / "examples" / "data_plane.py"
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("The capital of France is Paris.")
