"""The native checkpoint: a directory with params/ (Orbax), config.json, tokenizer files, manifest.

Written beside its destination and put in place by one rename; the manifest, without which nothing
is taken for a checkpoint, is written last. Tensors are hashed one by one and verified when read.
Knows no foreign format; `converters` writes and reads it.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from orbax.checkpoint.experimental import v1 as ocp

from swiftjax.config import DTYPES, ModelConfig
from swiftjax.errors import CheckpointError
from swiftjax.model.hf_config import read_json_object, read_model_config, to_hf
from swiftjax.model.llama import abstract_params
from swiftjax.tokenizer_files import TokenizerFiles, read_tokenizer_files, write_tokenizer_files

FORMAT = "swiftjax"
FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
CONFIG_FILE = "config.json"
PARAMS_FOLDER = "params"
# Orbax needs about three times a group while it writes one; a smaller group costs more merging.
GROUP_BYTES = 64 * 2**20


class StoredParam(NamedTuple):
    """One entry of the manifest."""

    shape: tuple[int, ...]
    dtype: str
    sha256: str

    @property
    def num_bytes(self) -> int:
        """Size of the values."""
        return int(np.prod(self.shape)) * jnp.dtype(self.dtype).itemsize


def is_native(path: Path) -> bool:
    """Whether a path is a directory that `save_native` finished."""
    return (path / MANIFEST_FILE).is_file()


class NativeCheckpoint:
    """An existing native checkpoint whose manifest was found to fit its configuration.

    Raises CheckpointError naming the file and listing every parameter that does not fit.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._params = _read_manifest(path / MANIFEST_FILE)
        self.config = read_model_config(path, read_json_object(path / CONFIG_FILE))
        self._check_shapes()
        self.num_params = sum(int(np.prod(param.shape)) for param in self._params.values())

    def tokenizer_files(self) -> TokenizerFiles:
        """Read the tokenizer's files."""
        return read_tokenizer_files(self.path)

    def read(self) -> Iterator[tuple[str, np.ndarray]]:
        """Read every parameter, a group at a time. Raises CheckpointError on a wrong hash."""
        context = ocp.Context()
        context.pytree.loading.partial_load = True
        for group in _groups(self._params):
            wanted = {
                name: np.empty(param.shape, jnp.dtype(param.dtype)) for name, param in group.items()
            }
            try:
                with context:
                    found = ocp.load(str(self.path / PARAMS_FOLDER), wanted)
            except Exception as error:  # Orbax and TensorStore raise whatever broken files cause
                raise CheckpointError(
                    f"{self.path / PARAMS_FOLDER} cannot be read: {error}"
                ) from error
            del wanted
            for name, param in group.items():
                # Orbax leaves what it does not find uninitialised: only the hash tells.
                values = found.pop(name)
                if values.shape != param.shape or tensor_sha256(values) != param.sha256:
                    raise CheckpointError(
                        f"{self.path}: parameter {name} is not what was written (its SHA-256 "
                        "differs): convert the model again"
                    )
                yield name, values

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
            if expected[name].shape != self._params[name].shape:
                problems.append(
                    f"misshapen: {name} is {list(self._params[name].shape)}, config.json asks "
                    f"for {list(expected[name].shape)}"
                )
        if problems:
            listed = "\n".join(sorted(problems))
            raise CheckpointError(f"{self.path}: the manifest does not fit config.json:\n{listed}")


def save_native(
    destination: Path,
    *,
    config: ModelConfig,
    tensors: Iterator[tuple[str, np.ndarray]],
    tokenizer_files: TokenizerFiles,
    force: bool = False,
) -> None:
    """Write a native checkpoint, consuming `tensors`; all of it appears at once or not at all.

    Raises CheckpointError when the destination exists (with `force`: when it is something else
    than a native checkpoint), or cannot be written.
    """
    check_destination(destination, force=force)
    temporary = destination.with_name(f".{destination.name}.tmp-{uuid.uuid4().hex}")
    try:
        temporary.mkdir()
        params = _write_params(temporary / PARAMS_FOLDER, tensors)
        (temporary / CONFIG_FILE).write_text(json.dumps(to_hf(config), indent=2) + "\n")
        write_tokenizer_files(tokenizer_files, temporary)
        manifest = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "params": {name: param._asdict() for name, param in params.items()},
        }
        (temporary / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1) + "\n")
        _sync_tree(temporary)
        _publish(temporary, destination, force=force)
    except OSError as error:
        raise CheckpointError(f"{destination} cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already if it was published


def check_destination(destination: Path, *, force: bool) -> None:
    """Raise CheckpointError unless a checkpoint may be written at `destination`."""
    if not destination.parent.is_dir():
        raise CheckpointError(f"{destination.parent} is no directory: create it first")
    if not os.path.lexists(destination):
        return
    if not force:
        raise CheckpointError(f"{destination} exists: choose another place or give --force")
    if destination.is_symlink() or not is_native(destination):
        raise CheckpointError(
            f"{destination} exists and is no checkpoint that SwiftJAX wrote; --force replaces "
            "only those: remove it yourself"
        )


def tensor_sha256(values: np.ndarray) -> str:
    """SHA-256 of a tensor's values: C order, little-endian."""
    return hashlib.sha256(np.ascontiguousarray(values).view(np.uint8).data).hexdigest()


def _write_params(
    folder: Path, tensors: Iterator[tuple[str, np.ndarray]]
) -> dict[str, StoredParam]:
    params: dict[str, StoredParam] = {}
    group: dict[str, np.ndarray] = {}
    for name, values in tensors:
        params[name] = StoredParam(values.shape, values.dtype.name, tensor_sha256(values))
        group[name] = values
        if sum(held.nbytes for held in group.values()) >= GROUP_BYTES:
            ocp.partial.save(str(folder), group)
            group = {}
    if group:
        ocp.partial.save(str(folder), group)
    ocp.partial.finalize(str(folder))
    return params


def _groups(params: Mapping[str, StoredParam]) -> Iterator[dict[str, StoredParam]]:
    group: dict[str, StoredParam] = {}
    for name, param in params.items():
        group[name] = param
        if sum(held.num_bytes for held in group.values()) >= GROUP_BYTES:
            yield group
            group = {}
    if group:
        yield group


def _sync_tree(root: Path) -> None:
    for base, _, files in os.walk(root, topdown=False):
        for path in (*(Path(base) / name for name in files), Path(base)):
            _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish(temporary: Path, destination: Path, *, force: bool) -> None:
    aside = destination.with_name(f".{destination.name}.old-{uuid.uuid4().hex}")
    if force and destination.exists():
        destination.rename(aside)
    try:
        temporary.rename(destination)
    except OSError:
        if aside.exists():
            aside.rename(destination)
        raise
    _sync(destination.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _read_manifest(path: Path) -> dict[str, StoredParam]:
    manifest = read_json_object(path)
    if (manifest.get("format"), manifest.get("format_version")) != (FORMAT, FORMAT_VERSION):
        raise CheckpointError(
            f"{path}: format {manifest.get('format')!r:.80} version "
            f"{manifest.get('format_version')!r:.80}; {FORMAT!r} version {FORMAT_VERSION} is read"
        )
    try:
        params = {
            str(name): StoredParam(tuple(map(int, entry["shape"])), entry["dtype"], entry["sha256"])
            for name, entry in manifest["params"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is broken: {error!r}") from error
    for name, param in params.items():
        if param.dtype not in DTYPES or any(size < 1 for size in param.shape):
            raise CheckpointError(
                f"{path}: parameter {name!r:.200} has an impossible type or shape"
            )
    return params
