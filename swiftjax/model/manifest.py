"""The manifest of a native checkpoint: what every parameter is, and where it lies.

Two conversions of the same model give the same bytes. Knows no Orbax. Used by `checkpoint`.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from swiftjax.errors import CheckpointError
from swiftjax.model.config_json import read_json_object
from swiftjax.model_config import DTYPES

FORMAT = "swiftjax"
FORMAT_VERSION = 3
MANIFEST_FILE = "manifest.json"
PIECE_BYTES = 2**26  # of a tensor, hashed by itself; part of the format
# What parameters have: the model's dtype, or the codes, zero points and words of quantised ones.
STORED_DTYPES = (*DTYPES, "int8", "uint8", "int32", "float8_e4m3fn")


class StoredParam(NamedTuple):
    """One entry: `group` is the number of the folder it lies in."""

    shape: tuple[int, ...]
    dtype: str
    sha256: str
    group: int

    @property
    def num_bytes(self) -> int:
        """Size of the values."""
        return int(np.prod(self.shape)) * jnp.dtype(self.dtype).itemsize


def tensor_sha256(values: np.ndarray) -> str:
    """SHA-256 of a tensor's values: C order, little-endian.

    Of more than PIECE_BYTES it is that of the digests of all pieces, which are hashed side by side:
    a core takes some 1 GB/s, and a table of embeddings may have that alone.
    """
    data = np.ascontiguousarray(values).view(np.uint8).reshape(-1).data
    if data.nbytes <= PIECE_BYTES:
        return hashlib.sha256(data).hexdigest()

    def digest(first: int) -> bytes:
        return hashlib.sha256(data[first : first + PIECE_BYTES]).digest()

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        digests = b"".join(pool.map(digest, range(0, data.nbytes, PIECE_BYTES)))
    return hashlib.sha256(digests).hexdigest()


def is_ours(path: Path) -> bool:
    """Whether a directory is a checkpoint that SwiftJAX wrote."""
    try:
        return read_json_object(path / MANIFEST_FILE).get("format") == FORMAT
    except CheckpointError:
        return False


def write_manifest(directory: Path, params: Mapping[str, StoredParam]) -> None:
    """Write the manifest of a directory."""
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "params": {name: param._asdict() for name, param in params.items()},
    }
    (directory / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1) + "\n")


def read_manifest(directory: Path) -> dict[str, StoredParam]:
    """Read the manifest. Raises CheckpointError for another format and for broken entries."""
    path = directory / MANIFEST_FILE
    manifest = read_json_object(path)
    if (manifest.get("format"), manifest.get("format_version")) != (FORMAT, FORMAT_VERSION):
        raise CheckpointError(
            f"{path}: format {manifest.get('format')!r:.80} version "
            f"{manifest.get('format_version')!r:.80}; {FORMAT!r} version {FORMAT_VERSION} is read: "
            "convert the model again"
        )
    try:
        params = {str(name): read_param(entry) for name, entry in manifest["params"].items()}
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise CheckpointError(f"{path} is broken: {error!r}") from error
    for name, param in params.items():
        if param.dtype not in STORED_DTYPES or any(size < 1 for size in param.shape):
            raise CheckpointError(
                f"{path}: parameter {name!r:.200} has an impossible type or shape"
            )
    return params


def read_param(entry: Mapping[str, Any]) -> StoredParam:
    """Make an entry of its JSON; raises KeyError, TypeError or ValueError if it is broken."""
    shape = tuple(map(int, entry["shape"]))
    return StoredParam(shape, entry["dtype"], entry["sha256"], int(entry["group"]))
