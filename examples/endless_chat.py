"""A chat that never ends: python examples/endless_chat.py [--model-path smollm2-135m] [--turns 12].

All turns are sent every time. The model reads the first tokens and the last ones, so the chat goes
on long after it has outgrown the model's context, in the same few pages.
"""

import argparse
import itertools

from swiftjax import Engine, GenerationConfig, Streaming

QUESTIONS = ["Tell me about a sea.", "And who lives there?", "What do they eat?", "Why is that so?"]


def main() -> None:
    """Ask in turn, and show how long the chat is and what it takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", default="smollm2-135m", help="checkpoint, GGUF or name")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of one answer")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--window", type=int, default=128)
    args = parser.parse_args()

    engine = Engine(args.model_path, streaming=True, max_batch_size=1)
    config = GenerationConfig(
        max_new_tokens=args.max_new_tokens,
        repetition_penalty=1.1,
        streaming=Streaming(sink=4, window=args.window),
    )
    chat: list[dict[str, str]] = []
    for question in itertools.islice(itertools.cycle(QUESTIONS), args.turns):
        chat.append({"role": "user", "content": question})
        prompt = engine.tokenizer.apply_chat_template(chat)
        [answer] = engine.generate([prompt], config)
        chat.append({"role": "assistant", "content": answer.text})
        length = len(answer.prompt_token_ids) + len(answer.token_ids)
        print(f"> {question}\n{answer.text}\n  [{length} tokens of chat]\n")


if __name__ == "__main__":
    main()
