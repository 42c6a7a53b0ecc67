"""Reads an array of a Zarr v3 folder that lies in one stretch of one file, as Orbax writes it here.

Such a file is a shard of one chunk, not compressed: the values, then the shard's index (the
specification's codec `sharding_indexed`). Read so it takes a fraction of what Orbax takes, which
reads all that is stored otherwise. Called by `param_files.py`.
"""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

CHECKSUM_BYTES = 4  # of the index, at its end
PLAIN_CODECS: list[list[dict[str, Any]]] = [
    [{"name": "bytes"}],
    [{"name": "bytes", "configuration": {"endian": "little"}}],
]


def read_stretch(folder: Path, shape: tuple[int, ...], dtype: str) -> np.ndarray | None:
    """Read the values of the array in a folder; None where they are not one stretch of a file."""
    num_bytes = int(np.prod(shape)) * jnp.dtype(dtype).itemsize
    try:
        if not _is_one_chunk(json.loads((folder / "zarr.json").read_text()), shape, dtype):
            return None
        with folder.joinpath("c", *("0" for _ in shape)).open("rb") as file:
            values = np.fromfile(file, np.uint8, num_bytes)
            index = file.read()
    except (OSError, ValueError, KeyError, TypeError):
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
    names = [index_codec["name"] for index_codec in shard["index_codecs"]]
    return (
        (described["data_type"], described["shape"], *chunk_shapes) == (dtype, *[whole] * 3)
        and (codec["name"], names) == ("sharding_indexed", ["bytes", "crc32c"])
        and shard.get("index_location", "end") == "end"
        and shard["codecs"] in PLAIN_CODECS
        and described["chunk_key_encoding"] == {"name": "default"}
    )
