"""Answer a few prompts together: python examples/offline.py [--model-path smollm2-135m]."""

import argparse
import time

from swiftjax import Engine, GenerationConfig

PROMPTS = ["The capital of France is", "1, 2, 3, 4, 5,", "Once upon a time"]


def main() -> None:
    """Load, generate, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", default="smollm2-135m", help="checkpoint, GGUF or name")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    args = parser.parse_args()

    engine = Engine(args.model_path, max_batch_size=len(PROMPTS))
    start = time.monotonic()
    config = GenerationConfig(max_new_tokens=args.max_new_tokens)
    answers = engine.generate(PROMPTS, config)
    seconds = time.monotonic() - start
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        print(f"{prompt!r} -> {answer.text!r} ({answer.finish_reason})")
    tokens = sum(len(answer.token_ids) for answer in answers)
    print(f"{tokens} tokens in {seconds:.1f} s, what had to be compiled included")


if __name__ == "__main__":
    main()
