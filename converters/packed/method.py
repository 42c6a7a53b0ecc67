"""Which quantiser wrote a checkpoint, by its configuration. Called by `load`."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from swiftjax.converters.packed.awq import Awq
from swiftjax.converters.packed.coded import CodedMatrix, Holding
from swiftjax.converters.packed.compressed import CompressedTensors
from swiftjax.converters.packed.fp8 import Fp8
from swiftjax.converters.packed.gptq import Gptq
from swiftjax.converters.source import CheckpointSource
from swiftjax.errors import UnsupportedError
from swiftjax.hf_config import QUANT_METHOD
from swiftjax.model.config_json import read_json_object

QUANTIZATION_KEYS = ("quantization_config", "compression_config")  # the second in old files
OLD_GPTQ_FILE = "quantize_config.json"


@runtime_checkable
class PackedMethod(Protocol):
    """Reads the matrices of one quantiser; holding and read raise CheckpointError."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the tensors that make up a module."""
        ...

    def modules(self, source: CheckpointSource) -> Iterator[str]:
        """Names of the quantised modules."""
        ...

    def holding(self, source: CheckpointSource, module: str) -> Holding:
        """Say how one module is held, without reading its codes."""
        ...

    def read(self, source: CheckpointSource, module: str) -> CodedMatrix:
        """Read one module."""
        ...


METHODS: dict[str, Callable[[Mapping[str, Any]], PackedMethod]] = {
    "gptq": Gptq,
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8,
    "fbgemm_fp8": Fp8,
}


def packed_method(directory: Path, config: Mapping[str, Any]) -> PackedMethod | None:
    """Choose the reader; None for a checkpoint that nobody quantised.

    Raises UnsupportedError for another quantiser, or a variant that is not read.
    """
    block = next((config[key] for key in QUANTIZATION_KEYS if config.get(key)), None)
    if not block and (directory / OLD_GPTQ_FILE).is_file():
        block = {"quant_method": "gptq"} | read_json_object(directory / OLD_GPTQ_FILE)
    if not isinstance(block, Mapping) or not block:
        return None
    name = block.get("quant_method")
    if name == QUANT_METHOD:
        return None
    method = METHODS.get(str(name))
    if method is None:
        raise UnsupportedError(
            f"the checkpoint is quantised with {name!r:.80}, which is not read; "
            f"{', '.join(METHODS)} are: give one of those or the original weights"
        )
    return method(block)
