"""The parameter files of a native checkpoint: groups of parameters, each an Orbax checkpoint.

A group is written and read alone, so a conversion can stop between two, and reading overlaps with
checking. Knows no manifest. Used by `checkpoint`.
"""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import jax.numpy as jnp
import numpy as np

from swiftjax.errors import CheckpointError
from swiftjax.model.zarr_array import read_stretch

FOLDER = "params"
ITEM = "state"  # where Orbax puts the arrays of a group
# Orbax needs about three times a group while it writes one.
GROUP_BYTES = 64 * 2**20


def group_path(checkpoint: Path, number: int) -> Path:
    """The folder of one group."""
    return checkpoint / FOLDER / f"{number:05}"


def save_group(path: Path, group: dict[str, np.ndarray]) -> None:
    """Write one group. Raises CheckpointError when that fails."""
    ocp = _orbax()
    context = ocp.Context()
    # Trained weights hardly shrink, and on two cores zstd took most of a conversion's time.
    context.array.saving.use_compression = False
    # A file for each array, which is read without Orbax then.
    context.array.saving.use_ocdbt = False
    try:
        with context:
            ocp.save(str(path.absolute()), group)
    except (ValueError, OSError) as error:  # TensorStore reports a full disk as a ValueError
        raise CheckpointError(f"parameters cannot be written: {error!s:.1000}") from error


def load_group(
    path: Path, wanted: Mapping[str, tuple[tuple[int, ...], str]]
) -> dict[str, np.ndarray]:
    """Read parameters of one group, given their shapes and dtypes.

    What Orbax does not find it leaves uninitialised. Raises CheckpointError when files are broken.
    """
    plain = {
        name: values
        for name, like in wanted.items()
        if (values := read_stretch(path / ITEM / name, *like)) is not None
    }
    return plain | _load_by_orbax(path, {n: wanted[n] for n in wanted.keys() - plain.keys()})


def _load_by_orbax(
    path: Path, wanted: Mapping[str, tuple[tuple[int, ...], str]]
) -> dict[str, np.ndarray]:
    """Whatever it lies in, such as what earlier versions wrote; a fifth as fast."""
    if not wanted:
        return {}
    ocp = _orbax()
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    try:
        likes = {name: np.empty(shape, jnp.dtype(dtype)) for name, (shape, dtype) in wanted.items()}
        with context:
            return dict(ocp.load(str(path.absolute()), likes))
    except Exception as error:  # Orbax and TensorStore raise whatever broken files cause
        raise CheckpointError(f"{path} cannot be read: {error!s:.1000}") from error


def _orbax() -> ModuleType:
    """Importing it takes half a second, which models of other formats do without."""
    from orbax.checkpoint.experimental import v1

    logging.getLogger("absl").addFilter(_is_news)
    return v1


def _is_news(record: logging.LogRecord) -> bool:
    """Orbax warns whenever arrays have files of their own that it found none to merge."""
    return "Skipping merge of OCDBT" not in str(record.msg)


def file_sizes(checkpoint: Path, below: Path) -> dict[str, int]:
    """Size of every file by its path inside the checkpoint; a link counts as none."""
    return {
        path.relative_to(checkpoint).as_posix(): path.stat().st_size
        for path in sorted(below.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def differences(found: Mapping[str, int], written: Mapping[str, int]) -> Iterator[str]:
    """Say which files are not as they were written."""
    for name in sorted(found.keys() | written.keys()):
        if name not in found:
            yield f"{name} is lost"
        elif name not in written:
            yield f"{name} was added"
        elif found[name] != written[name]:
            yield f"{name} has {found[name]} bytes of {written[name]}"
