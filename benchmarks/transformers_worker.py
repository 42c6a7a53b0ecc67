"""Times one request in Hugging Face transformers (sdpa); a worker of `cpu_vs_transformers.py`.

Builds the model from the arrays of the same GGUF file, dequantised by gguf. Imports torch and
transformers only, so that it can run in an environment without jax.

    python -m benchmarks.transformers_worker GGUF --prompt 512 --output 128 --runs 3 --threads 2
"""

import argparse
import importlib.metadata
import json
import time
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

LAYER_TENSORS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


class Clock(BaseStreamer):
    """Notes when each token arrives."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt first, then with every token."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to flush."""


def load(path: str) -> LlamaForCausalLM:
    """Build the fp32 model with sdpa attention from a LLaMA GGUF file with a tied head."""
    reader = gguf.GGUFReader(path)
    tensors = {t.name: t for t in reader.tensors}

    def number(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    def array(name: str) -> np.ndarray:
        tensor = tensors[f"{name}.weight"]
        return gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)

    config = LlamaConfig(
        vocab_size=len(array("token_embd")),
        hidden_size=number("embedding_length"),
        intermediate_size=number("feed_forward_length"),
        num_hidden_layers=number("block_count"),
        num_attention_heads=number("attention.head_count"),
        num_key_value_heads=number("attention.head_count_kv"),
        max_position_embeddings=number("context_length"),
        rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": number("rope.freq_base")},
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    weights = {"embed_tokens": array("token_embd"), "norm": array("output_norm")}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        for name, source in LAYER_TENSORS.items():
            weight = array(f"blk.{layer}.{source}")
            if source in heads:  # GGUF stores rotary pairs side by side
                pairs = weight.reshape(heads[source], -1, 2, weight.shape[1])
                weight = pairs.swapaxes(1, 2).reshape(weight.shape)
            weights[f"layers.{layer}.{name}"] = weight
    model = LlamaForCausalLM(config).float().eval()
    state = {f"model.{k}.weight": torch.from_numpy(v.copy()) for k, v in weights.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if set(missing) != {"lm_head.weight"} or unexpected:
        raise SystemExit(f"the file does not fit: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model


def time_request(model: LlamaForCausalLM, prompt: list[int], num_output: int) -> dict[str, Any]:
    """Generate greedily without stopping; seconds to the first token and tokens/s after it."""
    ids, clock = torch.tensor([prompt]), Clock()
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_output,
            min_new_tokens=num_output,
            do_sample=False,
            pad_token_id=0,
            streamer=clock,
        )
    first, last = clock.times[1], clock.times[-1]
    return {
        "first_token_s": first - start,
        "decode_tokens_per_s": (num_output - 1) / (last - first),
        "token_ids": out[0, len(prompt) :].tolist(),
    }


def main() -> None:
    """Print one JSON object: the runs after a warm-up, and the versions."""
    parser = argparse.ArgumentParser()
    parser.add_argument("gguf")
    for name in ("prompt", "output", "runs", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = load(args.gguf)
    runs = []
    for seed in range(1 + args.runs):  # the prompts of `swiftjax_worker`
        generator = np.random.default_rng(seed)
        prompt = generator.integers(3, model.config.vocab_size, args.prompt).tolist()
        runs.append(time_request(model, prompt, args.output))
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    print(json.dumps({"runs": runs[1:], "versions": versions}))


if __name__ == "__main__":
    main()
