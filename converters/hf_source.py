"""A Hugging Face model directory: config.json, weights (one file or shards), tokenizer files.

Weights are safetensors or, where there are none, PyTorch's .bin. With an index, only the files it
names are read; others in the directory are ignored. Knows nothing of models. Used by `load`.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from swiftjax.converters.foreign import refuse_foreign
from swiftjax.converters.safetensors_io import StoredTensor, open_safetensors, read_tensor
from swiftjax.converters.source import TensorInfo
from swiftjax.converters.torch_file import open_torch
from swiftjax.errors import CheckpointError
from swiftjax.model.config_json import read_json_object
from swiftjax.model_config import DTYPES, Dtype
from swiftjax.tokenizer_files import TOKENIZER_FILES, TokenizerFiles, read_tokenizer_files

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
INDEX_SUFFIX = ".index.json"
# Single files in the order of preference, and what opens one.
OPENERS = {"model.safetensors": open_safetensors, "pytorch_model.bin": open_torch}

Opener = Callable[[Path], dict[str, StoredTensor]]


class HfConfigs(NamedTuple):
    """The contents of config.json and of generation_config.json, empty without one."""

    config: Mapping[str, Any]
    generation: Mapping[str, Any]


def read_configs(directory: Path) -> HfConfigs:
    """Read the two files, which say what the weights have to be."""
    if not (directory / CONFIG_FILE).exists():
        refuse_foreign(directory)
        raise CheckpointError(_no_config(directory))
    generation: Mapping[str, Any] = {}
    if (directory / GENERATION_FILE).exists():
        generation = read_json_object(resolve_inside(directory, GENERATION_FILE))
    return HfConfigs(read_json_object(resolve_inside(directory, CONFIG_FILE)), generation)


class HfSource:
    """Implements CheckpointSource. Raises CheckpointError listing what is missing or broken."""

    def __init__(self, directory: Path, configs: HfConfigs) -> None:
        self.path = directory
        self.config, self.generation = configs
        self._stored = _open_weights(directory)
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(stored.shape, stored.dtype) for name, stored in self._stored.items()
        }

    @property
    def file_dtype(self) -> Dtype | None:
        """The type that holds most bytes; float32 for float64, None for 8-bit floats."""
        sizes: Counter[str] = Counter()
        for stored in self._stored.values():
            name = stored.dtype.name.replace("float64", "float32")
            sizes[name] += stored.num_bytes
        most = max(sizes, key=lambda name: sizes[name], default="")
        return next((dtype for dtype in DTYPES if dtype == most), None)

    def label(self, name: str) -> str:
        """The name itself: the file uses Hugging Face names."""
        return name

    def read(self, name: str) -> np.ndarray:
        """Read one tensor into fresh memory."""
        return read_tensor(self._stored[name])

    def tokenizer_files(self) -> TokenizerFiles:
        """Read tokenizer.json, tokenizer_config.json and the chat template."""
        for name in TOKENIZER_FILES:
            if os.path.lexists(self.path / name):
                resolve_inside(self.path, name)
        return read_tokenizer_files(self.path)


def resolve_inside(directory: Path, name: str) -> Path:
    """Find a file of a checkpoint directory, refusing a name or link that leads out of it.

    A link into the `blobs` folder beside `snapshots` is followed: so the Hugging Face cache stores
    its files. Raises CheckpointError naming the file.
    """
    pure = PurePosixPath(name)
    if not name or "\0" in name or pure.is_absolute() or ".." in pure.parts:
        raise CheckpointError(f"{directory}: {name!r} leads out of the checkpoint directory")
    path = directory / name
    if not os.path.isfile(path):  # unlike Path.is_file, says no to a name that cannot be one
        raise CheckpointError(f"{str(path)!r:.300} does not exist")
    root, target = directory.resolve(), path.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(folder) for folder in allowed):
        raise CheckpointError(
            f"{path} is a link to {target}, out of the checkpoint directory: copy the file instead"
        )
    return path


def _no_config(directory: Path) -> str:
    files = sorted(path.name for path in directory.glob("*.gguf"))
    hint = f"; give the path of {files[0]} itself" if files else ": it is no model directory"
    return f"{directory / CONFIG_FILE} does not exist{hint}"


def _open_weights(directory: Path) -> dict[str, StoredTensor]:
    for single, open_file in OPENERS.items():
        if (directory / f"{single}{INDEX_SUFFIX}").exists():
            return _open_shards(directory, f"{single}{INDEX_SUFFIX}", open_file)
        if (directory / single).exists():
            return open_file(resolve_inside(directory, single))
    refuse_foreign(directory)
    names = " nor ".join(f"{name} nor {name}{INDEX_SUFFIX}" for name in OPENERS)
    raise CheckpointError(f"{directory} holds neither {names}: it has no weights that are read")


def _open_shards(directory: Path, index_file: str, open_file: Opener) -> dict[str, StoredTensor]:
    """Open the files an index names, and check that each tensor lies where the index says."""
    weight_map = read_json_object(resolve_inside(directory, index_file)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{directory / index_file} has no weight_map")
    if bad := [file for file in weight_map.values() if not isinstance(file, str)]:
        raise CheckpointError(f"{directory / index_file}: {bad[0]!r:.80} is not a file name")
    shards, problems = {}, []
    for file in sorted(set(weight_map.values())):
        try:
            shards[file] = open_file(resolve_inside(directory, file))
        except CheckpointError as error:
            problems.append(str(error))
    stored: dict[str, StoredTensor] = {}
    for name, file in weight_map.items():
        if file in shards and name not in shards[file]:
            problems.append(f"{directory / file} lacks tensor {name!r}, which the index puts there")
        elif file in shards:
            stored[name] = shards[file][name]
    for file, tensors in shards.items():
        for name in tensors.keys() - weight_map.keys():
            problems.append(f"{directory / file} holds tensor {name!r}, which the index lacks")
    if problems:
        raise CheckpointError("\n".join(problems))
    return stored
