"""The problems that every implementation of attention must solve, on a CPU and on a GPU."""

from swiftjax.kernels import IMPLEMENTATIONS
from tests.kernels.attention_case import Shape

# Those whose ops are all their own, of any dtype: mosaic has one (`test_chunk_attention.py`).
WHOLE = tuple(name for name in IMPLEMENTATIONS if name != "mosaic")

DECODES = {
    "lengths": Shape(sequences=((0, 1), (14, 1), (15, 1), (16, 1), (299, 1), (511, 1))),
    "one": Shape(sequences=((639, 1),)),
    "one head": Shape(sequences=((20, 1), (0, 1)), num_kv_heads=1, group=1),
    "group 3": Shape(sequences=((40, 1), (270, 1)), num_kv_heads=3, group=3),
    "group 5": Shape(sequences=((40, 1), (270, 1)), group=5),
    "group 16": Shape(sequences=((40, 1), (7, 1)), group=16),
    "head 8": Shape(sequences=((40, 1), (7, 1)), head_dim=8),
    "head 80": Shape(sequences=((40, 1), (7, 1)), head_dim=80),
    "head 256": Shape(sequences=((40, 1), (7, 1)), head_dim=256),
    "page 64": Shape(sequences=((127, 1), (128, 1), (3, 1)), page_size=64),
    "page 128": Shape(sequences=((127, 1), (128, 1), (700, 1)), page_size=128),
    "window": Shape(sequences=((0, 1), (99, 1), (600, 1), (31, 1)), window=32),
    "window 1": Shape(sequences=((0, 1), (300, 1)), window=1),
    "sinks": Shape(
        sequences=((2, 1), (15, 1), (599, 1), (39, 1), (300, 1)),
        streams=((4, 36), (4, 36), (4, 36), (1, 7), (0, 0)),
    ),
    "long sinks": Shape(sequences=((600, 1), (310, 1)), streams=((280, 20), (0, 16))),
    "bfloat16": Shape(sequences=((40, 1), (300, 1)), head_dim=64, dtype="bfloat16"),
    "float16": Shape(sequences=((40, 1), (300, 1)), head_dim=64, dtype="float16"),
}
RAGGED = {
    "one prompt": Shape(sequences=((0, 300),)),
    "one token": Shape(sequences=((0, 1),)),
    "prompts": Shape(sequences=((0, 17), (0, 1), (0, 64), (0, 16)), padding=5),
    "mixed": Shape(sequences=((500, 1), (30, 70), (0, 33), (15, 1)), padding=23),
    "empty rows": Shape(sequences=((0, 0), (9, 3), (50, 0), (20, 2), (0, 0)), padding=11),
    "chunk on context": Shape(sequences=((600, 130),), group=4, num_kv_heads=1),
    "group 3": Shape(sequences=((40, 9), (270, 31)), num_kv_heads=3, group=3, padding=1),
    "head 96": Shape(sequences=((40, 9), (7, 1)), head_dim=96),
    "page 128": Shape(sequences=((127, 2), (128, 40), (0, 3)), page_size=128),
    "window": Shape(sequences=((0, 150), (99, 1), (400, 61)), window=32, padding=4),
    "sinks": Shape(
        sequences=((0, 90), (300, 41), (2, 1), (0, 50), (300, 1)),
        streams=((4, 36), (20, 17), (4, 36), (0, 0), (4, 20)),
        padding=9,
    ),
    "bfloat16": Shape(sequences=((40, 20), (0, 65)), head_dim=64, dtype="bfloat16"),
}
PROMPTS = {
    "full": Shape(sequences=((0, 64),), num_kv_heads=2, group=4, head_dim=64, dtype="bfloat16"),
    "padded": Shape(
        sequences=((0, 211), (0, 0), (0, 0)), group=4, head_dim=128, page_size=64, padding=45,
        dtype="bfloat16",
    ),
    "short table": Shape(
        sequences=((0, 20),), group=1, head_dim=80, padding=100, spare_pages=0, dtype="float16"
    ),
    "one token": Shape(sequences=((0, 1),), head_dim=64, padding=31, dtype="float16"),
}  # fmt: skip
