"""Other weights for an engine that runs: read and checked on the host, then put in place.

What fits has the same tensors, model constants and text side, so no program is compiled again and
no request notices but by its answers. Called by the engine process.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from swiftjax.build import BuiltCore
from swiftjax.config import EngineConfig
from swiftjax.errors import InvalidRequestError
from swiftjax.model.params import abstract_params
from swiftjax.model_config import ModelConfig
from swiftjax.sizing import open_model
from swiftjax.tokenizer_files import TokenizerFiles

REMEDY = "start another server for it"


class WeightSwap:
    """The weights of one built engine. `read` and `use` are called in turn, by any thread."""

    def __init__(self, config: EngineConfig, built: BuiltCore) -> None:
        self._config = config
        self._built = built
        self._waiting: dict[str, np.ndarray] | None = None

    def read(self, path: str) -> None:
        """Read a checkpoint to host memory, all of it; the engine goes on meanwhile.

        Raises InvalidRequestError naming the first tensor, constant or text file that differs, and
        what opening and reading a checkpoint raises.
        """
        running = self._built.model_config
        load_format = self._config.load_format if path == self._config.model_path else "auto"
        config = replace(
            self._config, model_path=path, dtype=running.dtype, load_format=load_format
        )
        opened = open_model(config)
        name = Path(path).name
        _check_tensors(name, running, opened.config)
        _check_constants(name, running, opened.config)
        self._check_text(name, opened.tokenizer_files)
        self._waiting = None
        self._waiting = {name: np.asarray(values) for name, values in opened.tensors(frozenset())}

    def use(self) -> None:
        """Compute with what was read last; no step may run."""
        assert self._waiting is not None, "nothing was read"
        self._built.runner.replace_weights(self._waiting)
        self._waiting = None

    def forget(self) -> None:
        """Give up what was read last."""
        self._waiting = None

    def _check_text(self, name: str, files: TokenizerFiles) -> None:
        running = self._built.tokenizer.files
        if json.loads(files.tokenizer_json) != json.loads(running.tokenizer_json):
            raise InvalidRequestError(f"{name} has another tokenizer: {REMEDY}")
        own_template = self._config.chat_template is None
        if own_template and files.chat_template != running.chat_template:
            raise InvalidRequestError(f"{name} has another chat template: {REMEDY}")


def _check_tensors(name: str, running: ModelConfig, other: ModelConfig) -> None:
    dtype = np.dtype(running.dtype or "float32")
    ours, theirs = (abstract_params(config, dtype) for config in (running, other))
    for tensor in sorted(ours.keys() | theirs.keys()):
        mine, its = (params.get(tensor) for params in (ours, theirs))
        if mine is None or its is None:
            lacks = "has no" if its is None else "has an additional"
            raise InvalidRequestError(f"{name} {lacks} tensor {tensor}: {REMEDY}")
        if (mine.shape, mine.dtype) != (its.shape, its.dtype):
            raise InvalidRequestError(
                f"tensor {tensor} of {name} is {its.dtype}{list(its.shape)}; the running model's "
                f"is {mine.dtype}{list(mine.shape)}: {REMEDY}"
            )


def _check_constants(name: str, running: ModelConfig, other: ModelConfig) -> None:
    """Compiled programs hold the model's constants, so these cannot be changed either."""
    ours, theirs = asdict(running), asdict(other)
    for field in ours:
        if ours[field] != theirs[field]:
            raise InvalidRequestError(
                f"{field} of {name} is {theirs[field]}; the running model's is {ours[field]}: "
                f"{REMEDY}"
            )
