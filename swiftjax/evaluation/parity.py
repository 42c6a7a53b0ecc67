"""Hidden states of every layer beside those of transformers, or beside a file of such states.

A file may hold a sample of channels and of the vocabulary only. transformers is imported where it
is installed, for this comparison alone. Called by `swiftjax parity`.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import jax
import numpy as np
from jaxtyping import Float, Int32

from swiftjax import kernels
from swiftjax.converters.load import LoadedCheckpoint
from swiftjax.errors import CheckpointError, InvalidRequestError, UnsupportedError
from swiftjax.kernel_choice import read_implementation
from swiftjax.model.kernel_support import choose_kernels
from swiftjax.model.layer_pass import LayerPass
from swiftjax.model.step_model import StepModel
from swiftjax.model.text_pass import PAGE_SIZE

GOLDENS = Path(__file__).parent / "goldens"
GOLDEN_CHANNELS, GOLDEN_TOKENS = 64, 256


@dataclass(frozen=True, kw_only=True, slots=True)
class States:
    """What a model made of a text: the embedding, every layer but the last, and the last norm."""

    token_ids: Int32[np.ndarray, " T"]
    hidden: Float[np.ndarray, "states T C"]
    logits: Float[np.ndarray, "T W"]
    channels: Int32[np.ndarray, " C"]  # which of the model's width are in `hidden`
    vocabulary: Int32[np.ndarray, " W"]  # which tokens are in `logits`

    def sample(self, channels: np.ndarray, vocabulary: np.ndarray) -> "States":
        """The same of fewer channels and tokens, by their numbers in this one."""
        return States(
            token_ids=self.token_ids,
            hidden=self.hidden[:, :, channels],
            logits=self.logits[:, vocabulary],
            channels=self.channels[channels],
            vocabulary=self.vocabulary[vocabulary],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """How far one state is from the other's: in relation to its size, and at most."""

    name: str
    relative: float
    largest: float


def our_states(
    loaded: LoadedCheckpoint,
    token_ids: Int32[np.ndarray, " T"],
    implementation: str | None,
) -> States:
    """Run a loaded model layer by layer; raises InvalidRequestError for too long a text."""
    config = loaded.config
    chosen = choose_kernels(read_implementation(implementation), config, PAGE_SIZE)
    runs = LayerPass(config, length=len(token_ids), implementation=chosen)
    x = runs.embed(loaded.params["embed.embedding"], token_ids)
    hidden = [x]
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        params = {n.removeprefix(prefix): v for n, v in loaded.params.items() if prefix in n}
        x = runs.run(layer, params, x)
        hidden.append(x)
    hidden[-1] = x = kernels.rms_norm(x, loaded.params["norm.scale"], config.rms_norm_eps)
    model = StepModel(config, max_model_len=len(token_ids), implementation=chosen)
    llama, _ = model.merge(model.bind(loaded.params))
    logits = _wide(llama.logits(x, chosen))
    return _whole(token_ids, np.stack([_wide(h) for h in hidden]), logits)


def has_transformers() -> bool:
    """Whether transformers and torch are installed."""
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def their_states(path: Path, token_ids: Int32[np.ndarray, " T"]) -> States:
    """What transformers makes of the text in float32.

    Raises UnsupportedError where it is not installed, CheckpointError for what it cannot load.
    """
    if not has_transformers():
        raise UnsupportedError(
            "transformers or torch is not installed: pip install 'swiftjax[parity]', or compare "
            "with --golden"
        )
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    folder, keys = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
    auto: Any = transformers.AutoModelForCausalLM
    try:
        model = auto.from_pretrained(folder, dtype=torch.float32, **keys).eval()
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(f"transformers cannot load {path}: {error}") from error
    with torch.no_grad():
        out = model(torch.from_numpy(token_ids[None].astype(np.int64)), output_hidden_states=True)
    hidden = np.stack([state[0].numpy() for state in out.hidden_states])
    return _whole(token_ids, hidden, out.logits[0].float().numpy())


def read_golden(path: Path) -> States:
    """Read a file that `write_golden` wrote; raises CheckpointError for any other."""
    try:
        with path.open("rb") as file, np.load(file) as arrays:  # numpy leaves a broken one open
            return States(**{name: arrays[name] for name in States.__slots__})
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise CheckpointError(f"{path} is no file of hidden states: {error}") from error


def write_golden(path: Path, states: States) -> None:
    """Keep a sample of states in a file, small enough to stand beside code."""

    def spread(size: int, count: int) -> np.ndarray:
        return np.unique(np.linspace(0, size - 1, count).astype(np.int32))

    channels = spread(len(states.channels), GOLDEN_CHANNELS)
    states = states.sample(channels, spread(len(states.vocabulary), GOLDEN_TOKENS))
    np.savez_compressed(path, **{name: getattr(states, name) for name in States.__slots__})


def differences(ours: States, theirs: States) -> list[Difference]:
    """Compare layer by layer, on what `theirs` has; raises InvalidRequestError for other shapes."""
    if len(ours.hidden) != len(theirs.hidden) or theirs.channels.max() >= len(ours.channels):
        raise InvalidRequestError(
            f"the model has {len(ours.hidden) - 1} layers of width {len(ours.channels)}; the "
            f"states are of {len(theirs.hidden) - 1} layers and channel {theirs.channels.max()}: "
            "they belong to another model"
        )
    ours = ours.sample(theirs.channels, theirs.vocabulary)
    count = len(ours.hidden) - 1
    names = ["embedding", *(f"layer {i}" for i in range(count - 1)), "last norm", "logits"]
    pairs = [*zip(ours.hidden, theirs.hidden, strict=True), (ours.logits, theirs.logits)]
    return [_difference(name, *pair) for name, pair in zip(names, pairs, strict=True)]


def _difference(name: str, ours: np.ndarray, theirs: np.ndarray) -> Difference:
    wrong = np.subtract(ours, theirs, dtype=np.float64)
    size = float(np.linalg.norm(theirs.astype(np.float64)))
    return Difference(
        name=name,
        relative=float(np.linalg.norm(wrong)) / max(size, 1e-30),
        largest=float(np.abs(wrong).max()),
    )


def _whole(token_ids: np.ndarray, hidden: np.ndarray, logits: np.ndarray) -> States:
    return States(
        token_ids=token_ids,
        hidden=hidden,
        logits=logits,
        channels=np.arange(hidden.shape[2], dtype=np.int32),
        vocabulary=np.arange(logits.shape[1], dtype=np.int32),
    )


def _wide(x: jax.Array) -> np.ndarray:
    return np.asarray(x.astype("float32"))
