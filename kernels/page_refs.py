"""Pages inside the kernels, plain or in 8 bits: loading what attention reads, storing new tokens.

Knows neither grids nor softmax. What 8 bits mean stands in `quantized_pages.py`; everything here
runs inside a Pallas kernel. Letters as in `paged_tile.py`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from swiftjax.kernels import _triton
from swiftjax.kernels.paged_tile import Keys, Ref, load_rows
from swiftjax.kernels.quantized_reference import FP8, SMALLEST_SCALE, largest_value
from swiftjax.kernels.trips import Tile


class PageRefs(NamedTuple):
    """References to the pages of keys or values, and to their scales where they are in 8 bits."""

    values: Ref  # [P K S H]
    scales: Ref | None  # [P K S]


def split_page_refs(
    refs: tuple[Ref, ...], quantized: bool
) -> tuple[PageRefs, PageRefs, tuple[Ref, ...]]:
    """Take keys and values, as `page_arrays` lists them, off the front of a kernel's arguments."""
    if not quantized:
        return PageRefs(refs[0], None), PageRefs(refs[1], None), refs[2:]
    return PageRefs(*refs[:2]), PageRefs(*refs[2:4]), refs[4:]


def load_pages(
    pages: PageRefs, keys: Keys, head: Any, seen: Bool[Array, " C"] | None, tile: Tile, dtype: Any
) -> tuple[Float[Array, "C W"], Float[Array, " C"] | None]:
    """Load the keys or values of a trip; 8 bits as numbers of `dtype`, with their scales.

    The scales are not applied here: they belong to whole rows, so that one factor for a score or a
    weight does what one for every number would.
    """
    index = (keys.page, head, keys.offset)
    rows = load_rows(pages.values, index, seen, tile)
    if pages.scales is None:
        return rows, None
    at = pages.scales.at[index]
    scales = _triton.load(at) if seen is None else _triton.load(at, mask=seen, other=0)
    return rows.astype(dtype), scales


def store_pages(
    pages: PageRefs,
    place: tuple[Any, ...],
    parts: list[tuple[Array, Array, Array]],
    stored: Bool[Array, "T 1"],
) -> None:
    """Store heads at `place`, each in parts of columns: (rows [T W], columns [1 W], mask [T W]).

    Rows are zero outside their mask. Pages in 8 bits get values and a scale, as
    `quantize_heads` makes them, of all parts of a head together.
    """
    if pages.scales is None:
        for rows, columns, mask in parts:
            target = pages.values.at[(*place, columns)]
            _triton.store(target, rows.astype(pages.values.dtype), mask=mask)
        return
    largest = largest_value(pages.values.dtype)
    wide = [rows.astype(jnp.float32) for rows, _, _ in parts]
    peaks = [jnp.abs(rows).max(axis=1)[:, None] for rows in wide]
    peak = peaks[0] if len(peaks) == 1 else jnp.maximum(*peaks)
    scale = jnp.maximum(peak / largest, SMALLEST_SCALE)
    for rows, (_, columns, mask) in zip(wide, parts, strict=True):
        values = jnp.minimum(jnp.maximum(rows / scale, -largest), largest)
        if pages.values.dtype != FP8:
            values = _triton.round_even(values).astype(jnp.int32)
        target = pages.values.at[(*place, columns)]
        _triton.store(target, values.astype(pages.values.dtype), mask=mask)
    _triton.store(pages.scales.at[place], scale, mask=stored)


def value_dtype(dtype: Any) -> Any:
    """The type to multiply weights with 8-bit values in: both are exact, or as good, in bfloat16.

    A weight times a scale can be less than float16 holds.
    """
    return jnp.bfloat16 if dtype == jnp.float16 else dtype
