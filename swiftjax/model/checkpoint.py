"""The native checkpoint: a directory with params/ (Orbax), config.json, tokenizer files, manifest.

Written beside its destination and put in place by one rename; the manifest, without which nothing
is taken for a checkpoint, is written last. Tensors are hashed one by one and verified when read.
Knows no foreign format; `converters` writes and reads it.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from swiftjax.config import DTYPES, ModelConfig
from swiftjax.errors import CheckpointError
from swiftjax.model import param_files
from swiftjax.model.ahead import ahead
from swiftjax.model.config_json import read_json_object, read_model_config, to_hf
from swiftjax.model.manifest import (
    MANIFEST_FILE,
    StoredParam,
    is_ours,
    read_manifest,
    read_param,
    tensor_sha256,
    write_manifest,
)
from swiftjax.model.params import abstract_params
from swiftjax.model.unfinished import Unfinished, recover, unfinished_directory
from swiftjax.tokenizer_files import TokenizerFiles, read_tokenizer_files, write_tokenizer_files

CONFIG_FILE = "config.json"
# Apart from the manifest: Orbax names its files anew every time.
FILES_FILE = "files.json"
READ_BYTES = 768 * 2**20  # six groups at once: Orbax reads one at 0.5 GB/s
FLOATS = {*DTYPES}  # cast into one another on loading

# Gives parameters in an order of their own; those named need not be given, but may be.
Tensors = Callable[[Set[str]], Iterator[tuple[str, Any]]]
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
        _refuse_links(path)
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
                2 * sum(param.num_bytes for param in group.values()),
                partial(self._read_group, number, group, verify),
            )
            for number, group in groups.items()
        )
        for values in ahead(jobs, budget=READ_BYTES):
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


def save_native(
    destination: Path,
    *,
    config: ModelConfig,
    tensors: Tensors,
    tokenizer_files: TokenizerFiles,
    plan: str,
    force: bool = False,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write a native checkpoint; all of it appears at once or not at all.

    Continues what a process with the same `plan` left behind that was killed; `progress` is told
    the bytes done. Raises CheckpointError when the destination exists (with `force`: when it is
    something else than a native checkpoint), or cannot be written.
    """
    check_destination(destination, force=force)
    try:
        with unfinished_directory(destination, plan, replace=force) as work:
            params = _write_params(work, tensors, progress or (lambda done: None))
            folder = work.folder
            (folder / CONFIG_FILE).write_text(json.dumps(to_hf(config), indent=2) + "\n")
            write_tokenizer_files(tokenizer_files, folder)
            sizes = param_files.file_sizes(folder, folder / param_files.FOLDER)
            (folder / FILES_FILE).write_text(json.dumps(sizes, indent=1) + "\n")
            write_manifest(folder, params)
    except OSError as error:
        raise CheckpointError(f"{destination} cannot be written: {error}") from error


def check_destination(destination: Path, *, force: bool) -> None:
    """Raise CheckpointError unless a checkpoint may be written at `destination`.

    First puts in order what a process left that was killed while it replaced it.
    """
    if not destination.parent.is_dir():
        raise CheckpointError(f"{destination.parent} is no directory: create it first")
    recover(destination, is_ours)
    if not os.path.lexists(destination):
        return
    if not force:
        raise CheckpointError(f"{destination} exists: choose another place or give --force")
    if destination.is_symlink() or not is_ours(destination):
        raise CheckpointError(
            f"{destination} exists and is no checkpoint that SwiftJAX wrote; --force replaces "
            "only those: remove it yourself"
        )


def _refuse_links(path: Path) -> None:
    for base, folders, files in os.walk(path):
        for name in (*folders, *files):
            if (Path(base) / name).is_symlink():
                raise CheckpointError(
                    f"{Path(base) / name} is a link, which a native checkpoint does not hold: copy "
                    "the file instead"
                )


def _write_params(
    work: Unfinished, tensors: Tensors, progress: Callable[[int], None]
) -> dict[str, StoredParam]:
    params = _resumed(work)
    done = sum(param.num_bytes for param in params.values())
    progress(done)
    group: dict[str, np.ndarray] = {}
    hashes: dict[str, Future[str]] = {}
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:

        def finish() -> None:
            number = len(work.entries)
            path = param_files.group_path(work.folder, number)
            param_files.save_group(path, group)
            new = {
                name: StoredParam(values.shape, values.dtype.name, hashes[name].result(), number)
                for name, values in group.items()
            }
            work.record(path, {name: param._asdict() for name, param in new.items()})
            params.update(new)
            group.clear()

        for name, values in tensors(frozenset(params)):
            if name in params:
                _check_same(name, values, params[name], work)
                continue
            group[name] = values
            hashes[name] = pool.submit(tensor_sha256, values)
            done += values.nbytes
            if sum(held.nbytes for held in group.values()) >= param_files.GROUP_BYTES:
                finish()
            progress(done)
        if group:
            finish()
    return params


def _resumed(work: Unfinished) -> dict[str, StoredParam]:
    """The parameters that an earlier process wrote; removes the group that it was writing."""
    folder = work.folder / param_files.FOLDER
    folder.mkdir(exist_ok=True)
    kept = {param_files.group_path(work.folder, i) for i in range(len(work.entries))}
    for path in folder.iterdir():
        if path not in kept:
            shutil.rmtree(path)
    return {name: read_param(param) for entry in work.entries for name, param in entry.items()}


def _check_same(name: str, values: np.ndarray, param: StoredParam, work: Unfinished) -> None:
    if tensor_sha256(values) != param.sha256:
        raise CheckpointError(
            f"{work.folder}: parameter {name} has other values than before the conversion was "
            "interrupted: start it again"
        )
