"""Writes a native checkpoint: beside its destination, put in place by one rename, manifest last.

So whatever kills the process, no half of one can be taken for a checkpoint, and the next process
goes on from the groups of parameters that are complete. Called by the converters.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from swiftjax.errors import CheckpointError
from swiftjax.model import param_files
from swiftjax.model.checkpoint import CONFIG_FILE, FILES_FILE
from swiftjax.model.config_json import to_hf
from swiftjax.model.manifest import StoredParam, is_ours, read_param, tensor_sha256, write_manifest
from swiftjax.model.unfinished import Unfinished, bytes_left, recover, unfinished_directory
from swiftjax.model_config import ModelConfig
from swiftjax.tokenizer_files import TokenizerFiles, write_tokenizer_files

# Gives parameters in an order of their own; those named need not be given, but may be.
Tensors = Callable[[Set[str]], Iterator[tuple[str, Any]]]


def save_native(
    destination: Path,
    *,
    config: ModelConfig,
    tensors: Tensors,
    tokenizer_files: TokenizerFiles,
    num_bytes: int,
    plan: str,
    force: bool = False,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write a native checkpoint; all of it appears at once or not at all.

    Continues what a process with the same `plan` left behind that was killed; `progress` is told
    the bytes done, of `num_bytes`. Raises CheckpointError when the destination exists (with
    `force`: when it is something else than a native checkpoint), has no room for that much, or
    cannot be written.
    """
    check_destination(destination, force=force)
    _check_room(destination, num_bytes)
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
    # TensorStore takes a backslash for a slash, and writes beside the destination then.
    if "\\" in os.fspath(destination.absolute()) or not _is_unicode(destination):
        raise CheckpointError(
            f"{os.fspath(destination)!r}: the path has a backslash or is not UTF-8, where nothing "
            "can be written: choose another"
        )
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


def _check_room(destination: Path, num_bytes: int) -> None:
    """Refuse before the first byte what a full disk would end hours later."""
    left = bytes_left(destination)
    free = shutil.disk_usage(destination.parent).free
    if num_bytes > left + free:
        raise CheckpointError(
            f"{destination} would take {(num_bytes - left) / 2**20:,.0f} MiB, and its disk has "
            f"{free / 2**20:,.0f} MiB free: make room or choose another place"
        )


def _is_unicode(path: Path) -> bool:
    try:
        os.fspath(path.absolute()).encode()
    except UnicodeEncodeError:
        return False
    return True


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
