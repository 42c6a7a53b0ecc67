"""Sizes of well-known models by name, for runs with random weights: speed needs nothing else."""

from swiftjax.model_config import ModelConfig, RopeConfig

_LLAMA3 = RopeConfig(theta=5e5)

SHAPES: dict[str, ModelConfig] = {
    "llama3-1b": ModelConfig(
        family="llama", vocab_size=128256, hidden_size=2048, intermediate_size=8192,
        num_layers=16, num_heads=32, num_kv_heads=8, head_dim=64, max_position=131072,
        rope=_LLAMA3, tie_word_embeddings=True, dtype="bfloat16",
    ),
    "llama3-3b": ModelConfig(
        family="llama", vocab_size=128256, hidden_size=3072, intermediate_size=8192,
        num_layers=28, num_heads=24, num_kv_heads=8, head_dim=128, max_position=131072,
        rope=_LLAMA3, tie_word_embeddings=True, dtype="bfloat16",
    ),
    "llama3-8b": ModelConfig(
        family="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336,
        num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, max_position=131072,
        rope=_LLAMA3, dtype="bfloat16",
    ),
    "llama3-70b": ModelConfig(
        family="llama", vocab_size=128256, hidden_size=8192, intermediate_size=28672,
        num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128, max_position=131072,
        rope=_LLAMA3, dtype="bfloat16",
    ),
    "smollm2-135m": ModelConfig(
        family="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536,
        num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, max_position=8192,
        rope=RopeConfig(theta=1e5), tie_word_embeddings=True, dtype="float32",
    ),
    "tiny": ModelConfig(
        family="llama", vocab_size=256, hidden_size=64, intermediate_size=128,
        num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_position=1024,
        dtype="float32",
    ),
}  # fmt: skip
