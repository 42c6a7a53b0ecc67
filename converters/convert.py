"""Convert any readable checkpoint into the native one, tensor by tensor.

Matching is `hf_llama`'s, writing is `model.checkpoint`'s; this module joins them. Called by the
CLI.
"""

import hashlib
import json
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from swiftjax.converters.calibration import Recipe
from swiftjax.converters.load import open_checkpoint
from swiftjax.converters.quantize import NEAREST
from swiftjax.errors import CheckpointError
from swiftjax.model import param_files
from swiftjax.model.checkpoint import Progress
from swiftjax.model.checkpoint_writer import check_destination, save_native
from swiftjax.model.config_json import to_hf
from swiftjax.model.manifest import FORMAT_VERSION
from swiftjax.model_config import Dtype, ModelConfig
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
    `dst` appears whole or not at all; what a killed conversion did is not done again. Raises
    CheckpointError when it exists (`force` replaces a native checkpoint), or when the source is
    broken.
    """
    started = time.monotonic()
    check_destination(dst, force=force)
    if dst.exists() and src.exists() and dst.samefile(src):
        raise CheckpointError(f"{dst} is the source itself: choose another destination")
    opened = open_checkpoint(src, dtype=dtype, quantization=quantization, recipe=recipe)
    save_native(
        dst,
        config=opened.config,
        tensors=opened.tensors,
        tokenizer_files=opened.tokenizer_files,
        num_bytes=opened.num_bytes,
        plan=_plan(src, opened.config, recipe),
        force=force,
        progress=progress and partial(_tell, progress, opened.num_bytes),
    )
    return ConvertReport(
        destination=dst,
        config=opened.config,
        num_params=opened.num_params,
        num_bytes=opened.num_bytes,
        seconds=time.monotonic() - started,
    )


def _tell(progress: Progress, num_bytes: int, done: int) -> None:
    progress(done, num_bytes)


def _plan(src: Path, config: ModelConfig, recipe: Recipe) -> str:
    """What makes two conversions the same: the source's files as they are now, and the outcome."""
    files = _visible_files(src) if src.is_dir() else [src]
    stats = [(str(path.relative_to(src.parent)), path.stat()) for path in files]
    facts = {
        "version": FORMAT_VERSION,
        "group_bytes": param_files.GROUP_BYTES,
        "source": [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
        "config": to_hf(config),
        "recipe": [recipe.method, recipe.symmetric, recipe.ranges],
        "texts": [text.tolist() for text in recipe.texts],
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _visible_files(src: Path) -> list[Path]:
    # Shards may lie in folders; what is hidden is no part of a model, but may be our own work.
    found = []
    for base, folders, files in os.walk(src):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(base) / name for name in files if (Path(base) / name).is_file()]
    return sorted(found)
