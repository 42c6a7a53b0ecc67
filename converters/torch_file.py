"""Read PyTorch's .bin files: a zip of one pickle and one uncompressed file per storage.

Gives the tensors as `safetensors_io` does, as places in the file; nothing is unpacked. The pickle
is the business of `restricted_pickle`. Knows no tensor names. Used by `hf_source`.
"""

import math
import os
import struct
import zipfile
from pathlib import Path
from typing import BinaryIO

import jax.numpy as jnp

from swiftjax.converters.restricted_pickle import (
    MAX_PICKLE_BYTES,
    Storage,
    StridedView,
    read_state_dict,
)
from swiftjax.converters.safetensors_io import MAX_RANK, StoredTensor
from swiftjax.errors import CheckpointError

LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature; lengths of the name and of the extra field
SIGNATURE = b"PK\x03\x04"


def open_torch(path: Path) -> dict[str, StoredTensor]:
    """Read and check everything but the values. Raises CheckpointError naming the file."""
    try:
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise CheckpointError(
                    f"{path} is no zip archive: it is cut short, or was saved before PyTorch 1.6. "
                    "Load it with PyTorch and save it again, best as safetensors"
                )
            with zipfile.ZipFile(file) as archive:
                return _open(path, file, archive)
    except (OSError, EOFError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!s:.300}") from error


def _open(path: Path, file: BinaryIO, archive: zipfile.ZipFile) -> dict[str, StoredTensor]:
    members = {info.filename: info for info in archive.infolist()}
    if len(members) < len(archive.infolist()):
        raise CheckpointError(f"{path} holds two files of one name: it is not read")
    pickles = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointError(f"{path} holds {len(pickles)} files data.pkl; one is needed")
    root = pickles[0].removesuffix("/data.pkl")
    order = members.get(f"{root}/byteorder")
    if order is not None and _member(path, archive, order) != b"little":
        raise CheckpointError(f"{path} is not little-endian: save it again as safetensors")
    views = read_state_dict(_member(path, archive, members[pickles[0]]), f"{path}: data.pkl")
    starts: dict[Storage, int] = {}
    for view in views.values():
        if view.storage not in starts:
            info = members.get(f"{root}/data/{view.storage.key}")
            starts[view.storage] = _start(path, file, info, view.storage)
    return {
        name: _stored(f"{path}: tensor {name!r:.200}", path, starts[view.storage], view)
        for name, view in views.items()
    }


def _member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """A small file of the archive."""
    where = f"{path}: {info.filename!r:.80}"
    if info.file_size > MAX_PICKLE_BYTES:
        raise CheckpointError(f"{where} is larger than {MAX_PICKLE_BYTES} bytes")
    _check_stored(info, where)
    return archive.read(info)


def _check_stored(info: zipfile.ZipInfo, where: str) -> None:
    """Refuse what would have to be unpacked: no size holds before that is done."""
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise CheckpointError(f"{where} is compressed or encrypted, which PyTorch does not do")


def _start(path: Path, file: BinaryIO, info: zipfile.ZipInfo | None, storage: Storage) -> int:
    """Where the values of a storage begin in the file."""
    where = f"{path}: storage {storage.key!r:.80}"
    if info is None:
        raise CheckpointError(f"{where} is missing")
    num_bytes = storage.numel * jnp.dtype(storage.dtype).itemsize
    _check_stored(info, where)
    if info.file_size != num_bytes or info.compress_size != num_bytes:
        raise CheckpointError(f"{where} has {info.file_size} bytes; it should have {num_bytes}")
    file.seek(info.header_offset)
    header = file.read(LOCAL_HEADER.size)
    if len(header) < LOCAL_HEADER.size or not header.startswith(SIGNATURE):
        raise CheckpointError(f"{where} is not where the archive says: the file is broken")
    _, name_length, extra_length = LOCAL_HEADER.unpack(header)
    start = info.header_offset + LOCAL_HEADER.size + name_length + extra_length
    if start + num_bytes > file.seek(0, os.SEEK_END):
        raise CheckpointError(f"{where} ends beyond the file: it is cut short or broken")
    return start


def _stored(where: str, path: Path, start: int, view: StridedView) -> StoredTensor:
    last = sum((n - 1) * step for n, step in zip(view.shape, view.strides, strict=True))
    if 0 not in view.shape and view.offset + last >= view.storage.numel:
        raise CheckpointError(f"{where} reaches beyond its storage of {view.storage.numel} values")
    # A stride of 0 makes many values of one: of a few bytes as many as no memory holds.
    if math.prod(view.shape) > view.storage.numel:
        raise CheckpointError(
            f"{where} with shape {list(view.shape)!s:.200} repeats the {view.storage.numel} values "
            "of its storage: save a clone() of it"
        )
    if len(view.shape) > MAX_RANK:
        raise CheckpointError(f"{where} has {len(view.shape)} dimensions; at most {MAX_RANK}")
    dtype = jnp.dtype(view.storage.dtype)
    offset = start + view.offset * dtype.itemsize
    strides = None if view.strides == _contiguous(view.shape) else view.strides
    return StoredTensor(path, offset, view.shape, dtype, strides)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
