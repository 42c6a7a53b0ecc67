"""Write PyTorch's .bin format by hand: opcode by opcode, so that no test needs torch or pickle."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

STORAGE_OF = {
    "float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage",
    "int64": "LongStorage", "int32": "IntStorage",
}  # fmt: skip


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def number(value: int) -> bytes:
    return b"J" + value.to_bytes(4, "little", signed=True)


def name_of(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def tensor(key: str, values: np.ndarray) -> bytes:
    """A call of _rebuild_tensor_v2 over a storage of its own."""
    strides = [step // values.itemsize for step in values.strides]
    storage = b"(" + text("storage") + name_of("torch", STORAGE_OF[values.dtype.name])
    storage += text(key) + text("cpu") + number(values.size) + b"tQ"
    sizes = b"(" + b"".join(map(number, values.shape)) + b"t"
    steps = b"(" + b"".join(map(number, strides)) + b"t"
    hooks = name_of("collections", "OrderedDict") + b")R"
    call = name_of("torch._utils", "_rebuild_tensor_v2")
    return call + b"(" + storage + number(0) + sizes + steps + b"\x89" + hooks + b"tR"


def state_dict(tensors: Mapping[str, np.ndarray]) -> bytes:
    """The pickle of a dict of contiguous tensors; storage i belongs to tensor i."""
    items = (text(name) + tensor(str(i), v) for i, (name, v) in enumerate(tensors.items()))
    return b"\x80\x02}(" + b"".join(items) + b"u."


def write_bin(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    *,
    pickled: bytes | None = None,
    extra: Mapping[str, bytes] | None = None,
    compression: int = zipfile.ZIP_STORED,
) -> Path:
    """Write one file; `pickled` in the place of what belongs there."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", state_dict(tensors) if pickled is None else pickled)
        archive.writestr("archive/byteorder", "little")
        for i, values in enumerate(tensors.values()):
            archive.writestr(f"archive/data/{i}", np.ascontiguousarray(values).tobytes())
        for name, data in (extra or {}).items():
            archive.writestr(name, data)
    return path


def as_bins(directory: Path, tensors: Mapping[str, Any], num_shards: int = 1) -> None:
    """Put .bin files in the place of a directory's safetensors."""
    for path in directory.glob("model*"):
        path.unlink()
    if num_shards == 1:
        write_bin(directory / "pytorch_model.bin", tensors)
        return
    weight_map = {}
    for i in range(num_shards):
        file = f"pytorch_model-{i + 1:05}-of-{num_shards:05}.bin"
        part = {name: tensors[name] for name in list(tensors)[i::num_shards]}
        write_bin(directory / file, part)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
