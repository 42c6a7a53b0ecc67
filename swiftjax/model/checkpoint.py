"""The native checkpoint: a directory with params/ (Orbax), config.json, tokenizer files, manifest.

Without its manifest nothing is taken for a checkpoint. Every tensor has a hash and is verified
when it is read. Knows no foreign format; `checkpoint_writer.py` writes what is read here.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Set
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from swiftjax.errors import CheckpointError
from swiftjax.model import param_files
from swiftjax.model.ahead import ahead
from swiftjax.model.config_json import read_json_object, read_model_config
from swiftjax.model.manifest import MANIFEST_FILE, StoredParam, read_manifest, tensor_sha256
from swiftjax.model.params import abstract_params
from swiftjax.model_config import DTYPES
from swiftjax.tokenizer_files import TokenizerFiles, read_tokenizer_files

CONFIG_FILE = "config.json"
# Apart from the manifest, which is the same after every conversion: Orbax's own files need not be.
FILES_FILE = "files.json"
FLOATS = {*DTYPES}  # cast into one another on loading

Progress = Callable[[int, int], None]


def is_native(path: Path) -> bool:
    """Whether a path is to be read as a native checkpoint.

    Other tools write a manifest.json too, so safetensors weights beside it decide.
    """
    return (path / MANIFEST_FILE).is_file() and not any(path.glob("*.safetensors"))


class NativeCheckpoint:
    """An existing native checkpoint whose manifest was found to fit its configuration.

    Raises CheckpointError naming the file and listing every parameter that does not fit.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _refuse_all_but_files(path)
        self._params = read_manifest(path)
        # Orbax answers a lost or shortened file with pages of tracebacks: tell it in one line here.
        found = param_files.file_sizes(path, path / param_files.FOLDER)
        written = read_json_object(path / FILES_FILE)
        if problems := list(param_files.differences(found, written)):
            raise CheckpointError(
                f"{path}: the files are not those that were written: {'; '.join(problems[:8])}: "
                "copy or convert the model again"
            )
        self.config = read_model_config(path, read_json_object(path / CONFIG_FILE))
        self._check_shapes()
        self.num_params = sum(int(np.prod(param.shape)) for param in self._params.values())

    def tokenizer_files(self) -> TokenizerFiles:
        """Read the tokenizer's files."""
        return read_tokenizer_files(self.path)

    def read(
        self, done: Set[str] = frozenset(), *, verify: bool = True
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Read every parameter that is not done, groups ahead of time in threads.

        Raises CheckpointError on a wrong hash, unless told not to `verify`.
        """
        groups: dict[int, dict[str, StoredParam]] = {}
        for name, param in self._params.items():
            if name not in done:
                groups.setdefault(param.group, {})[name] = param
        jobs = (
            (
                sum(param.num_bytes for param in group.values()),
                partial(self._read_group, number, group, verify),
            )
            for number, group in groups.items()
        )
        for values in ahead(jobs):
            # What was handed on is not kept here.
            while values:
                yield values.pop(0)

    def _read_group(
        self, number: int, group: Mapping[str, StoredParam], verify: bool
    ) -> list[tuple[str, np.ndarray]]:
        path = param_files.group_path(self.path, number)
        found = param_files.load_group(path, {n: (p.shape, p.dtype) for n, p in group.items()})
        for name, param in group.items():
            # What Orbax does not find it leaves uninitialised: only the hash tells.
            values = found[name]
            is_same = not verify or tensor_sha256(values) == param.sha256
            if values.shape != param.shape or not is_same:
                raise CheckpointError(
                    f"{path}: parameter {name} is not what was written (its SHA-256 differs): "
                    "copy or convert the model again"
                )
        return [(name, found[name]) for name in group]

    def _check_shapes(self) -> None:
        if self.config.num_layers > len(self._params):
            raise CheckpointError(
                f"{self.path}: config.json has {self.config.num_layers} layers; the manifest "
                f"lists only {len(self._params)} parameters"
            )
        expected = abstract_params(self.config, jnp.dtype(self.config.dtype or "float32"))
        problems = [f"missing: {name}" for name in expected.keys() - self._params.keys()]
        problems += [f"unexpected: {name}" for name in self._params.keys() - expected.keys()]
        for name in expected.keys() & self._params.keys():
            stored, asked = self._params[name], expected[name]
            if asked.shape != stored.shape:
                problems.append(
                    f"misshapen: {name} is {list(stored.shape)}, config.json asks for "
                    f"{list(asked.shape)}"
                )
            elif stored.dtype != asked.dtype and {stored.dtype, asked.dtype.name} - FLOATS:
                problems.append(
                    f"mistyped: {name} is {stored.dtype}, config.json asks for {asked.dtype.name}"
                )
        if problems:
            listed = "\n".join(sorted(problems))
            raise CheckpointError(f"{self.path}: the manifest does not fit config.json:\n{listed}")


def _refuse_all_but_files(path: Path) -> None:
    for base, folders, files in os.walk(path):
        for place in (Path(base) / name for name in (*folders, *files)):
            if place.is_symlink():
                kind = "a link"
            elif not (place.is_file() or place.is_dir()):
                kind = "a pipe or a device"  # reading it could take for ever
            else:
                continue
            raise CheckpointError(
                f"{place} is {kind}, which a native checkpoint does not hold: copy the file instead"
            )
