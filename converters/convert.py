"""Convert any readable checkpoint into the native one, tensor by tensor.

Matching is `hf_llama`'s, writing is `model.checkpoint`'s; this module joins them. Called by the
CLI.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from swiftjax.config import Dtype, ModelConfig
from swiftjax.converters.calibration import Recipe
from swiftjax.converters.load import OpenCheckpoint, Progress, open_checkpoint
from swiftjax.converters.quantize import NEAREST
from swiftjax.errors import CheckpointError
from swiftjax.model.checkpoint import check_destination, save_native
from swiftjax.quantization import Quantization


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertReport:
    """What was written."""

    destination: Path
    config: ModelConfig
    num_params: int  # elements of the source, not tensors
    num_bytes: int
    seconds: float


def convert(
    src: Path,
    dst: Path,
    *,
    dtype: Dtype | None,
    quantization: Quantization | None = None,
    recipe: Recipe = NEAREST,
    force: bool = False,
    progress: Progress | None = None,
) -> ConvertReport:
    """Write `src` as a native checkpoint at `dst`; dtype and quantisation as in `load_checkpoint`.

    `recipe` says how weights are rounded; a text in it needs tensors in the order of computation.
    `dst` appears whole or not at all. Raises CheckpointError when it exists (`force` replaces a
    native checkpoint), or when the source is broken.
    """
    started = time.monotonic()
    check_destination(dst, force=force)
    if dst.exists() and src.exists() and dst.samefile(src):
        raise CheckpointError(f"{dst} is the source itself: choose another destination")
    opened = open_checkpoint(src, dtype=dtype, quantization=quantization, recipe=recipe)
    save_native(
        dst,
        config=opened.config,
        tensors=_reporting(opened, progress),
        tokenizer_files=opened.tokenizer_files,
        force=force,
    )
    return ConvertReport(
        destination=dst,
        config=opened.config,
        num_params=opened.num_params,
        num_bytes=opened.num_bytes,
        seconds=time.monotonic() - started,
    )


def _reporting(
    opened: OpenCheckpoint, progress: Progress | None
) -> Iterator[tuple[str, np.ndarray]]:
    done = 0
    for name, values in opened.tensors:
        yield name, values
        done += values.nbytes
        if progress is not None:
            progress(done, opened.num_bytes)
