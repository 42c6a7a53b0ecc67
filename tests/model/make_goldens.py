"""Make the golden files with torch and transformers, or compare live (the `parity` extra).

    python -m tests.model.make_goldens            write tests/model/goldens/
    python -m tests.model.make_goldens --check    SwiftJAX against transformers, fresh weights

A golden model is a tiny random checkpoint as Hugging Face writes it beside `expected.npz`: token
ids and the fp32 logits of one full forward pass. `configs.json` holds what transformers' config
classes and modules make of many config.json files. No test imports this module.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from tests.model.golden_cases import MODELS, Config, config_variants

GOLDENS = Path(__file__).parent / "goldens"
TOLERANCE = 1e-4


def hf_config(raw: Config) -> Any:
    """Build transformers' config object for the contents of a config.json."""
    keys = {k: v for k, v in raw.items() if k not in ("model_type", "architectures")}
    return AutoConfig.for_model(raw["model_type"], **json.loads(json.dumps(keys)))


def hf_model(raw: Config, weights: dict[str, np.ndarray] | None = None) -> Any:
    """Build the fp32 eager model, on the meta device when no weights are given."""
    config = hf_config(raw)
    if weights is None:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    tensors = {name: torch.from_numpy(array) for name, array in weights.items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model.eval()


def random_weights(raw: Config, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Draw weights that keep logits of order 1 and every norm scale and bias visible."""
    weights = {}
    for name, tensor in hf_model(raw).state_dict().items():
        if name == "lm_head.weight" and raw.get("tie_word_embeddings"):
            continue
        shape = tuple(tensor.shape)
        if name.endswith("norm.weight"):
            array = rng.uniform(0.5, 1.5, shape)
        elif name.endswith("bias"):
            array = rng.normal(0, 0.5, shape)
        elif "embed_tokens" in name:
            array = rng.normal(0, 2 / np.sqrt(shape[1]), shape)
        else:
            array = rng.normal(0, 1.5 / np.sqrt(shape[1]), shape)
        weights[name] = array.astype(np.float32)
    return weights


def hf_logits(raw: Config, weights: dict[str, np.ndarray], token_ids: np.ndarray) -> np.ndarray:
    """Return the fp32 logits [T V] of one full forward pass."""
    with torch.inference_mode():
        out = hf_model(raw, weights)(torch.from_numpy(token_ids)[None], use_cache=False)
    return out.logits[0].numpy()


def write_checkpoint(directory: Path, raw: Config, weights: dict[str, np.ndarray]) -> None:
    """Write config.json, model.safetensors and a tokenizer with a name for each id."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw, indent=1) + "\n")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    vocab = {f"t{i}": i for i in range(raw["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore
    (directory / "tokenizer.json").write_text(tokenizer.to_str())
    (directory / "tokenizer_config.json").write_text("{}\n")


def describe(raw: Config) -> dict[str, Any]:
    """What transformers makes of a config.json, read from its modules where there is one."""
    config, model = hf_config(raw), hf_model(raw)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    windows = [
        getattr(layer.self_attn, "sliding_window", None) or 0 for layer in model.model.layers
    ]
    if raw["model_type"] == "mistral":
        windows = [config.sliding_window or 0] * config.num_hidden_layers
    rotary = type(model.model.rotary_emb)(config)
    eos = config.eos_token_id
    return {
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": attention.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "qkv_bias": attention.q_proj.bias is not None,
        "output_bias": attention.o_proj.bias is not None,
        "mlp_bias": mlp.down_proj.bias is not None,
        "qk_norm": hasattr(attention, "q_norm"),
        "layer_windows": windows,
        "bos_token_id": config.bos_token_id,
        "eos_token_ids": eos if isinstance(eos, list) else [] if eos is None else [eos],
        "inverse_frequencies": [float(f"{x:.9g}") for x in rotary.inv_freq.tolist()],
        "attention_factor": float(rotary.attention_scaling),
    }


def write_goldens() -> None:
    """Write every golden model and configs.json."""
    for seed, (name, (num_tokens, raw)) in enumerate(MODELS.items()):
        rng = np.random.default_rng(seed)
        weights = random_weights(raw, rng)
        token_ids = rng.integers(0, raw["vocab_size"], num_tokens)
        logits = hf_logits(raw, weights, token_ids)
        write_checkpoint(GOLDENS / name, raw, weights)
        np.savez_compressed(GOLDENS / name / "expected.npz", token_ids=token_ids, logits=logits)
        print(f"{name:22} {num_tokens:4} tokens, logits std {logits.std():.2f}")
    variants = {name: {"config": raw, "expected": describe(raw)} for name, raw in config_variants()}
    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in variants.items())
    (GOLDENS / "configs.json").write_text("{\n" + lines + "\n}\n")
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    (GOLDENS / "versions.json").write_text(json.dumps(versions) + "\n")


def check_live() -> bool:
    """Compare fresh random weights and tokens of every case; print each largest difference."""
    from swiftjax.converters.load import load_checkpoint
    from tests.forward import forward_logits

    worst = 0.0
    seed = int(np.random.SeedSequence().entropy) % 2**32
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, seed {seed}")
    for index, (name, (num_tokens, raw)) in enumerate(MODELS.items()):
        rng = np.random.default_rng((seed, index))
        weights = random_weights(raw, rng)
        token_ids = rng.integers(0, raw["vocab_size"], num_tokens)
        with tempfile.TemporaryDirectory() as directory:
            write_checkpoint(Path(directory), raw, weights)
            loaded = load_checkpoint(Path(directory), dtype="float32")
        ours = forward_logits(loaded.config, loaded.params, token_ids)
        difference = float(np.abs(ours - hf_logits(raw, weights, token_ids)).max())
        print(f"{name:22} max difference {difference:.1e}")
        worst = max(worst, difference)
    print(f"largest {worst:.1e}, limit {TOLERANCE:.0e}")
    return worst <= TOLERANCE


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="golden files from transformers")
    parser.add_argument("--check", action="store_true", help="compare live, write nothing")
    if parser.parse_args().check:
        return 0 if check_live() else 1
    write_goldens()
    return 0


if __name__ == "__main__":
    sys.exit(main())
