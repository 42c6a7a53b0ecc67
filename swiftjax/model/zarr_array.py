"""Reads an array of a Zarr v3 folder that lies in one stretch of one file, as Orbax writes it here.

Such a file is a shard of one chunk, not compressed: the values, then the shard's index (the
specification's codec `sharding_indexed`). Read so it takes a fraction of what Orbax takes, which
reads all that is stored otherwise. Called by `param_files.py`.
"""

import json
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

MOST_DESCRIBED = 16 * 1024  # bytes of a zarr.json; Orbax writes less than 1,000
INDEX_BYTES, CHECKSUM_BYTES = 20, 4  # of a shard's index, and of the checksum at its end
LITTLE_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}
PLAIN_CODECS: tuple[list[dict[str, Any]], ...] = ([{"name": "bytes"}], [LITTLE_ENDIAN])
INDEX_CODECS: list[dict[str, Any]] = [LITTLE_ENDIAN, {"name": "crc32c"}]


def read_stretch(folder: Path, shape: tuple[int, ...], dtype: str) -> np.ndarray | None:
    """Read the values of the array in a folder; None where they are not one stretch of a file."""
    num_bytes = int(np.prod(shape)) * jnp.dtype(dtype).itemsize
    try:
        with (folder / "zarr.json").open("rb") as file:
            described = json.loads(file.read(MOST_DESCRIBED))
        if not _is_one_chunk(described, shape, dtype):
            return None
        with folder.joinpath("c", *("0" for _ in shape)).open("rb") as file:
            if os.fstat(file.fileno()).st_size != num_bytes + INDEX_BYTES:
                return None
            values = np.fromfile(file, np.uint8, num_bytes)
            index = file.read()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # Orbax says what is wrong with it
    # Where the only chunk begins, and its length.
    if index[:-CHECKSUM_BYTES] != np.array([0, num_bytes], "<u8").tobytes():
        return None
    return values.view(jnp.dtype(dtype)).reshape(shape)


def _is_one_chunk(described: Any, shape: tuple[int, ...], dtype: str) -> bool:
    """Whether a zarr.json tells of one shard, of one chunk of plain values and the index."""
    (codec,) = described["codecs"]
    shard, whole = codec["configuration"], list(shape)
    chunk_shapes = (described["chunk_grid"]["configuration"]["chunk_shape"], shard["chunk_shape"])
    return (
        (described["zarr_format"], described["node_type"]) == (3, "array")
        and (described["data_type"], described["shape"], *chunk_shapes) == (dtype, *[whole] * 3)
        and described["chunk_key_encoding"] == {"name": "default"}
        and not described.get("storage_transformers")
        and codec["name"] == "sharding_indexed"
        and shard["codecs"] in PLAIN_CODECS
        and shard["index_codecs"] == INDEX_CODECS
        and shard.get("index_location", "end") == "end"
    )
