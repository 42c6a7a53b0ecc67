"""The tokenizer as the gateway wants it: a zip of a Hugging Face directory's text files."""

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator

from smg_grpc_proto.generated import common_pb2

from swiftjax.engine.tokenizer import Tokenizer
from swiftjax.serving.proto import swiftjax_pb2 as pb

PART_BYTES = 64 * 2**10
# The same files give the same bytes, so that two servers of a model have one fingerprint.
TIME = (1980, 1, 1, 0, 0, 0)


def make_bundle(tokenizer: Tokenizer, model: pb.GetModelResponse) -> list[bytes]:
    """Zip the files; takes a moment. Gives serialised parts, the last with the sha256 of all."""
    files = tokenizer.files
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **files.config}
    if files.chat_template is not None:
        config["chat_template"] = files.chat_template
    described = {
        "model_type": model.family,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_model_len,
        "eos_token_id": list(model.eos_token_ids),
        "bos_token_id": model.bos_token_id if model.HasField("bos_token_id") else None,
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in (
            ("config.json", json.dumps(described)),
            ("tokenizer.json", files.tokenizer_json),
            ("tokenizer_config.json", json.dumps(config)),
        ):
            archive.writestr(zipfile.ZipInfo(name, TIME), text)
    return [part.SerializeToString() for part in _parts(buffer.getvalue())]


def _parts(data: bytes) -> Iterator[common_pb2.GetTokenizerChunk]:
    starts = range(0, len(data), PART_BYTES)
    for start in starts:
        is_last = start == starts[-1]
        yield common_pb2.GetTokenizerChunk(
            data=data[start : start + PART_BYTES],
            sha256=hashlib.sha256(data).hexdigest() if is_last else "",
        )
