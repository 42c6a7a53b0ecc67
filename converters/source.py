"""What a checkpoint of somebody else offers the converter, whatever its file format.

Names and layouts are those of Hugging Face's LLaMA family; a source that stores them otherwise
(GGUF) translates. Knows nothing of our own names. Implemented by `hf_source` and `gguf_source`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from swiftjax.model_config import Dtype
from swiftjax.tokenizer_files import TokenizerFiles


class TensorInfo(NamedTuple):
    """Shape as Hugging Face gives it ([out, in] for matrices) and the type `read` returns."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@runtime_checkable
class CheckpointSource(Protocol):
    """One checkpoint, opened and checked, no tensor read yet."""

    @property
    def path(self) -> Path:
        """The file or directory, for messages."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """The contents of config.json, or the same facts in that shape."""
        ...

    @property
    def generation(self) -> Mapping[str, Any]:
        """The contents of generation_config.json; empty without one."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the checkpoint by its Hugging Face name."""
        ...

    @property
    def file_dtype(self) -> Dtype | None:
        """The type most weights are stored in; None where storage says nothing (quantised)."""
        ...

    def label(self, name: str) -> str:
        """The name of a tensor as the file spells it, for messages."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Read one tensor into memory that belongs to the caller."""
        ...

    def tokenizer_files(self) -> TokenizerFiles:
        """Read the tokenizer's files."""
        ...
