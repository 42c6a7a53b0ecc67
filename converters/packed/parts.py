"""The tensors that make up one quantised matrix in a file: whether all are there, and fit.

Used by the readers of the formats; knows none of them.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from swiftjax.converters.source import CheckpointSource
from swiftjax.errors import CheckpointError


class Part(NamedTuple):
    """What one tensor has to be; `kinds` are numpy's: i, u, f, and V for small floats."""

    shape: tuple[int, ...]
    kinds: str = "fV"


def modules_with(source: CheckpointSource, suffix: str) -> Iterator[str]:
    """Names of the modules that have a tensor of this name."""
    ending = f".{suffix}"
    return (name.removesuffix(ending) for name in source.tensors if name.endswith(ending))


def matrix_shape(source: CheckpointSource, name: str) -> tuple[int, int]:
    """The shape of a tensor that must be a matrix."""
    shape = source.tensors[name].shape
    if len(shape) != 2 or min(shape) < 1:
        raise CheckpointError(f"{source.path}: {name} is {list(shape)}, not a matrix")
    return shape


def check_parts(
    source: CheckpointSource, module: str, expected: Mapping[str, Part], given: str
) -> None:
    """Raise CheckpointError naming the first tensor that is missing or misshapen.

    `given` says in words what the shapes follow from.
    """
    for name, part in expected.items():
        found = source.tensors.get(f"{module}.{name}")
        if found is None or found.shape != part.shape or found.dtype.kind not in part.kinds:
            is_now = f"{found.dtype.name} {list(found.shape)}" if found else "missing"
            raise CheckpointError(
                f"{source.path}: {module}.{name} is {is_now}; with {given} it has to be "
                f"{'a float' if 'f' in part.kinds else 'an integer'} of shape {list(part.shape)}"
            )


def count_groups(num_inputs: int, group_size: int) -> int:
    """Groups of a row of inputs; a size below 1 means one for all."""
    return -(-num_inputs // group_size) if group_size > 0 else 1


def plain(value: Any, kind: type, default: Any = None) -> Any:
    """A value of a JSON file if it has the type it should have, else the default."""
    is_bool = isinstance(value, bool) and kind is not bool
    return value if isinstance(value, kind) and not is_bool else default
