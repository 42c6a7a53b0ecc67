"""A chat that never ends: python examples/endless_chat.py [--model-path smollm2-135m] [--turns 12].

A session keeps what was computed, so a turn costs what is new in it. The model reads the first
tokens and the last ones, so the chat goes on long after it has outgrown the model's context, in the
same few pages.
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
    config = GenerationConfig(max_new_tokens=args.max_new_tokens, repetition_penalty=1.1)
    with engine.open_session(streaming=Streaming(sink=4, window=args.window)) as session:
        for question in itertools.islice(itertools.cycle(QUESTIONS), args.turns):
            session.append([{"role": "user", "content": question}])
            answer = session.generate(config)
            computed = len(answer.prompt_token_ids) - answer.num_cached_tokens
            print(f"> {question}\n{answer.text}")
            print(f"  [{len(session)} tokens of chat, {computed} of them new to this turn]\n")


if __name__ == "__main__":
    main()
