"""A chat with sinks and a window sends what is new of it, and starts over with its turns."""

import asyncio
from contextlib import aclosing

from swiftjax.cli.chat import Turns, _endlessly
from swiftjax.engine.request import GenerationConfig
from swiftjax.engine.streaming import Streaming
from tests.serving.harness import make_core, make_engine


def test_turns_go_into_one_session_until_the_chat_starts_over() -> None:
    async def main() -> None:
        engine = make_engine(make_core(streams=True))
        streaming = Streaming(sink=2, window=20)
        ask = _endlessly(engine, GenerationConfig(max_new_tokens=3, streaming=streaming, seed=1))
        turns: Turns = []
        for _ in range(3):
            turns.append({"role": "user", "content": "hi"})
            answer = "".join([text async for text in ask(turns)])
            assert answer == "<=>"
            turns.append({"role": "assistant", "content": answer})
        [session] = engine.sessions._open.values()
        assert bytes(session.text.token_ids) == b"user:hi;<=>" + 2 * b";user:hi;<=>"
        async with aclosing(ask([*turns, {"role": "user", "content": "?"}])) as left_early:
            await anext(left_early)
        _ = [text async for text in ask(turns[:1])]
        [session] = engine.sessions._open.values()
        assert bytes(session.text.token_ids) == b"user:hi;<=>"
        await engine.close()

    asyncio.run(main())
