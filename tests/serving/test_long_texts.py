"""Texts that take long to tokenise: nobody else waits for them."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import pytest

from swiftjax.engine import text_threads
from swiftjax.engine.text_threads import (
    LONG_CHARS,
    count_chars,
    in_thread,
    set_owner,
    share_of,
)
from swiftjax.engine.tokenizer import Tokenizer
from swiftjax.serving.http.bodies import Message
from swiftjax.serving.http.prompts import render
from swiftjax.serving.http.tool_bodies import CalledFunction, MadeCall
from swiftjax.serving.proto import swiftjax_pb2 as pb
from tests.serving.harness import PATIENCE, Service, join, until
from tests.serving.test_cancel import run


def test_short_texts_do_not_wait_behind_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()

    async def body(service: Service) -> None:
        encode = service.engine.tokenizer.encode

        def slowly(text: str, *args: bool) -> list[int]:
            assert len(text) <= LONG_CHARS or may_go_on.wait(20)
            return encode(text[:100], *args)

        monkeypatch.setattr(service.engine.tokenizer, "encode", slowly)
        long = pb.TokenizeRequest(text="a" * (LONG_CHARS + 1))
        # More than the loop has threads.
        waiting = [asyncio.ensure_future(service.stub.Tokenize(long)) for _ in range(50)]
        await asyncio.sleep(0.1)
        for _ in range(3):
            request = pb.GenerateRequest(text="a", stop=pb.StopOptions(max_new_tokens=3))
            text, _ = await asyncio.wait_for(join(service.stub.Generate(request)), PATIENCE)
            assert text == "bcd"
        may_go_on.set()
        for answer in await asyncio.gather(*waiting):
            assert len(answer.token_ids) == 100

    run(body)


@pytest.mark.parametrize("num_chars", [LONG_CHARS, LONG_CHARS + 1], ids=["short", "long"])
def test_texts_of_one_owner_do_not_keep_another_waiting(num_chars: int) -> None:
    share = share_of(num_chars > LONG_CHARS)
    begun: list[str] = []
    may_go_on = threading.Event()

    def work(owner: str) -> None:
        begun.append(owner)
        assert may_go_on.wait(20)

    async def ask(owner: str) -> None:
        set_owner(owner)
        await in_thread(num_chars, partial(work, owner))

    async def main() -> None:
        waiting = [asyncio.create_task(ask("many")) for _ in range(5 * share)]
        await until(lambda: len(begun) == share)
        waiting[-1].cancel()
        one = asyncio.create_task(ask("one"))
        await asyncio.sleep(0.01)
        may_go_on.set()
        await asyncio.wait([one, *waiting])

    asyncio.run(main())
    assert begun == ["many"] * share + ["one"] + ["many"] * (4 * share - 1)


@pytest.mark.parametrize("num_chars", [LONG_CHARS, LONG_CHARS + 1], ids=["short", "long"])
def test_who_gives_up_has_the_thread_until_it_is_done(num_chars: int) -> None:
    share = share_of(num_chars > LONG_CHARS)
    begun: list[int] = []
    may_go_on = threading.Event()

    def work(turn: int) -> None:
        begun.append(turn)
        assert may_go_on.wait(20)

    async def give_up(turn: int) -> None:
        set_owner("gives up")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(in_thread(num_chars, partial(work, turn)), 0.05)

    async def main() -> None:
        set_owner("gives up")
        first = [asyncio.create_task(in_thread(num_chars, partial(work, 0))) for _ in range(share)]
        await until(lambda: len(begun) == share)
        for task in first:
            task.cancel()
        for turn in range(1, 3):
            await asyncio.gather(*(give_up(turn) for _ in range(share)))
        assert begun == [0] * share
        may_go_on.set()
        set_owner("gives up")
        await asyncio.gather(*(in_thread(num_chars, partial(work, 3)) for _ in range(share)))
        assert begun == [0] * share + [3] * share

    asyncio.run(main())


def test_who_gives_up_before_a_thread_is_free_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_go_on = threading.Event()
    done: list[int] = []

    async def main() -> None:
        monkeypatch.setattr(text_threads, "_long", ThreadPoolExecutor(1))
        blocker = asyncio.create_task(in_thread(LONG_CHARS + 1, partial(may_go_on.wait, 20)))
        await asyncio.sleep(0)  # it is first
        set_owner("gives up")
        for turn in range(5):
            with pytest.raises(TimeoutError):
                call = in_thread(LONG_CHARS + 1, partial(done.append, turn))
                await asyncio.wait_for(call, 0.01)
        may_go_on.set()
        await blocker
        await in_thread(LONG_CHARS + 1, partial(done.append, 5))
        assert done == [5]

    asyncio.run(main())


@pytest.mark.parametrize("where", ["content", "tool_calls", "tools"])
def test_a_chat_is_long_wherever_its_text_is(where: str) -> None:
    text, threads = "a" * LONG_CHARS, list[str]()

    class Renderer:
        def apply_chat_template(self, *_: object, **__: object) -> list[int]:
            threads.append(threading.current_thread().name)
            return []

    calls = [MadeCall(function=CalledFunction(name="f", arguments=text))]
    message: dict[str, Any] = {"role": "user", "content": "b"}
    message |= {"content": {"content": text}, "tool_calls": {"tool_calls": calls}}.get(where, {})
    tools = [{"type": "function", "function": {"name": "f", "description": text}}]
    offered = tools if where == "tools" else None
    tokenizer = cast(Tokenizer, Renderer())
    asyncio.run(render(tokenizer, [Message(**message)], LONG_CHARS, tools=offered))
    assert "long" in threads[0]


def test_what_is_long() -> None:
    assert count_chars("abc") == 3 and count_chars([1, 2]) == 0
    chat = [{"a": "abc", "b": [{"text": "d"}]}, {"a": None, "b": {"c": {"name": "e"}}}]
    assert count_chars(chat) == len("aabbabctextdcnamee")
    deep: object = "abc"
    for _ in range(10_000):
        deep = [deep]
    assert count_chars(deep) == 3
    name = partial(lambda: threading.current_thread().name)

    async def main() -> None:
        assert "long" not in await in_thread(LONG_CHARS, name)
        assert "long" in await in_thread(LONG_CHARS + 1, name)

    asyncio.run(main())
