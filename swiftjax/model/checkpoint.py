"""The native checkpoint: a directory with params/ (Orbax), config.json, tokenizer files, manifest.

Written beside its destination and put in place by one rename; the manifest, without which nothing
is taken for a checkpoint, is written last. Tensors are hashed one by one and verified when read.
Knows no foreign format; `converters` writes and reads it.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from orbax.checkpoint.experimental import v1 as ocp

from swiftjax.config import DTYPES, ModelConfig
from swiftjax.errors import CheckpointError
from swiftjax.model.atomic_directory import whole_directory
from swiftjax.model.config_json import read_json_object, read_model_config, to_hf
from swiftjax.model.params import abstract_params
from swiftjax.tokenizer_files import TokenizerFiles, read_tokenizer_files, write_tokenizer_files

FORMAT = "swiftjax"
FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
CONFIG_FILE = "config.json"
PARAMS_FOLDER = "params"
# What parameters have: the model's dtype, or the codes, zero points and words of quantised ones.
FLOATS = {*DTYPES}  # cast into one another on loading
STORED_DTYPES = (*DTYPES, "int8", "uint8", "int32", "float8_e4m3fn")
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
        manifest = read_json_object(path / MANIFEST_FILE)
        self._params = _manifest_params(path / MANIFEST_FILE, manifest)
        # Orbax answers a lost or shortened file with pages of tracebacks: tell it in one line here.
        if manifest.get("files") != _file_sizes(path):
            raise CheckpointError(
                f"{path}: the files in {PARAMS_FOLDER} are not those that were written; some are "
                "lost, cut short or added: copy or convert the model again"
            )
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
                    found = ocp.load(str(self.path.absolute() / PARAMS_FOLDER), wanted)
            except Exception as error:  # Orbax and TensorStore raise whatever broken files cause
                raise CheckpointError(
                    f"{self.path / PARAMS_FOLDER} cannot be read: {error!s:.1000}"
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
    try:
        with whole_directory(destination, replace=force) as temporary:
            params = _write_params(temporary / PARAMS_FOLDER, tensors)
            (temporary / CONFIG_FILE).write_text(json.dumps(to_hf(config), indent=2) + "\n")
            write_tokenizer_files(tokenizer_files, temporary)
            manifest = {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "files": _file_sizes(temporary),
                "params": {name: param._asdict() for name, param in params.items()},
            }
            (temporary / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1) + "\n")
    except OSError as error:
        raise CheckpointError(f"{destination} cannot be written: {error}") from error


def check_destination(destination: Path, *, force: bool) -> None:
    """Raise CheckpointError unless a checkpoint may be written at `destination`."""
    if not destination.parent.is_dir():
        raise CheckpointError(f"{destination.parent} is no directory: create it first")
    if not os.path.lexists(destination):
        return
    if not force:
        raise CheckpointError(f"{destination} exists: choose another place or give --force")
    if destination.is_symlink() or not _is_ours(destination):
        raise CheckpointError(
            f"{destination} exists and is no checkpoint that SwiftJAX wrote; --force replaces "
            "only those: remove it yourself"
        )


def _is_ours(path: Path) -> bool:
    try:
        return read_json_object(path / MANIFEST_FILE).get("format") == FORMAT
    except CheckpointError:
        return False


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
            _save_group(folder, group)
            group = {}
    if group:
        _save_group(folder, group)
    ocp.partial.finalize(str(folder.absolute()))
    return params


def _save_group(folder: Path, group: dict[str, np.ndarray]) -> None:
    context = ocp.Context()
    # Trained weights hardly shrink, and on two cores zstd took most of a conversion's time.
    context.array.saving.use_compression = False
    try:
        with context:
            ocp.partial.save(str(folder.absolute()), group)
    except ValueError as error:  # so TensorStore reports a full disk
        raise CheckpointError(f"parameters cannot be written: {error!s:.1000}") from error


def _groups(params: Mapping[str, StoredParam]) -> Iterator[dict[str, StoredParam]]:
    group: dict[str, StoredParam] = {}
    for name, param in params.items():
        group[name] = param
        if sum(held.num_bytes for held in group.values()) >= GROUP_BYTES:
            yield group
            group = {}
    if group:
        yield group


def _file_sizes(checkpoint: Path) -> dict[str, int]:
    """Size of every parameter file by its path inside the checkpoint."""
    return {
        path.relative_to(checkpoint).as_posix(): path.stat().st_size
        for path in sorted((checkpoint / PARAMS_FOLDER).rglob("*"))
        if path.is_file()
    }


def _manifest_params(path: Path, manifest: Mapping[str, Any]) -> dict[str, StoredParam]:
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
        if param.dtype not in STORED_DTYPES or any(size < 1 for size in param.shape):
            raise CheckpointError(
                f"{path}: parameter {name!r:.200} has an impossible type or shape"
            )
    return params
