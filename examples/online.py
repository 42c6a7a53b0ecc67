"""Stream several answers at once: python examples/online.py [--model-path smollm2-135m].

All streams run in the same batch. The last one is left early, which frees its memory at once.
"""

import argparse
import asyncio
from contextlib import aclosing

from swiftjax import AsyncEngine, EngineConfig, GenerationConfig, start_async_engine

QUESTIONS = ["What is 2+2?", "Name three colours.", "Write a long story about a ship."]


async def answer(engine: AsyncEngine, question: str, config: GenerationConfig) -> str:
    """Ask one question and print its text as it comes."""
    prompt = engine.tokenizer.apply_chat_template([{"role": "user", "content": question}])
    text = ""
    async for output in engine.stream(prompt, config):
        text += output.text
        print(f"{question!r} {output.num_output_tokens:3} tokens: {output.text!r}")
    return text


async def leave_early(engine: AsyncEngine, question: str, config: GenerationConfig) -> str:
    """Read ten tokens, then close the stream: the engine stops working on it."""
    prompt = engine.tokenizer.apply_chat_template([{"role": "user", "content": question}])
    text = ""
    async with aclosing(engine.stream(prompt, config)) as stream:
        async for output in stream:
            text += output.text
            if output.num_output_tokens >= 10:
                break
    return text


async def main() -> None:
    """Start an engine, ask everything together, show what became of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", default="smollm2-135m", help="checkpoint, GGUF or name")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    args = parser.parse_args()

    engine = start_async_engine(
        EngineConfig(model_path=args.model_path, max_batch_size=len(QUESTIONS))
    )
    config = GenerationConfig(max_new_tokens=args.max_new_tokens)
    *others, last = QUESTIONS
    try:
        answers = await asyncio.gather(
            *(answer(engine, question, config) for question in others),
            leave_early(engine, last, config),
        )
        for question, text in zip(QUESTIONS, answers, strict=True):
            print(f"\n{question}\n  {text}")
        while engine.stats().num_running:  # the engine hears of who left after its next step
            await asyncio.sleep(0.01)
        print(f"\n{engine.stats()}")
    finally:
        await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
