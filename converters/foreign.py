"""Formats that hold no weights we can use: refused with a sentence that says what to give instead.

Used by `load` for a file and by `hf_source` for a directory without weights.
"""

from pathlib import Path

from swiftjax.errors import UnsupportedError

FORMATS = {
    ".onnx": "ONNX",
    ".pb": "TensorFlow",
    ".h5": "TensorFlow (Keras)",
    ".keras": "TensorFlow (Keras)",
    ".tflite": "TensorFlow Lite",
    ".msgpack": "Flax",
    ".mlmodel": "Core ML",
    ".engine": "TensorRT",
    ".ckpt": "TensorFlow or PyTorch Lightning",
}


def refuse_foreign(path: Path) -> None:
    """Raise UnsupportedError if the file, or any file right in the directory, is a foreign one."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in files:
        name = FORMATS.get(file.suffix.lower())
        if name is not None:
            raise UnsupportedError(
                f"{file} is a {name} file, which is not read: give the Hugging Face directory "
                "that it was made from (config.json with .safetensors or .bin weights), or a GGUF "
                "file of the same model"
            )
