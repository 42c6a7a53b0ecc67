"""Many streams, one engine: the asyncio side of generation.

`AsyncEngine` tokenises, checks, submits and turns step outputs into text; it is what transports are
handed. It reaches the engine through an `EngineLink`. Knows nothing of gRPC, jax or the scheduler.
"""

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial

from swiftjax.config import ReaderLimits, SessionLimits
from swiftjax.engine.answer_reader import AnswerReader
from swiftjax.engine.answers import AnswerStream
from swiftjax.engine.async_session import AsyncSession
from swiftjax.engine.async_sessions import AsyncSessions
from swiftjax.engine.core import CoreStats
from swiftjax.engine.engine_link import EngineLink
from swiftjax.engine.grammar import GrammarCompiler
from swiftjax.engine.limits import EngineLimits
from swiftjax.engine.link_messages import News
from swiftjax.engine.mailbox import Mailbox
from swiftjax.engine.mailboxes import Mailboxes
from swiftjax.engine.request import (
    NO_OPTIONS,
    GenerationConfig,
    Request,
    RequestOptions,
    StreamOutput,
)
from swiftjax.engine.session import Turn
from swiftjax.engine.step_meter import StepReport
from swiftjax.engine.text_threads import in_thread, tokenise
from swiftjax.engine.tokenizer import Tokenizer
from swiftjax.errors import EngineDeadError, InvalidRequestError, SwiftJaxError
from swiftjax.memory import DeviceReport


class AsyncEngine:
    """Generates for many callers of one event loop.

    Close it with `await engine.close()`; streams that are still open then raise EngineDeadError.
    """

    def __init__(
        self,
        link: EngineLink,
        tokenizer: Tokenizer,
        limits: EngineLimits,
        reader_limits: ReaderLimits | None = None,
        watch: Callable[[StepReport | None], None] | None = None,
        session_limits: SessionLimits | None = None,
    ) -> None:
        """`watch` is called whenever the engine tells something, perhaps with measurements.

        Conversations are opened and found by `sessions`.
        """
        self.tokenizer = tokenizer
        self.limits = limits
        self.reader_limits = reader_limits or ReaderLimits()
        self._link = link
        self._watch = watch
        self._grammars = GrammarCompiler(
            tokenizer.files.tokenizer_json, limits.vocab_size, limits.eos_token_ids
        )
        self.sessions = AsyncSessions(
            link,
            tokenizer,
            limits,
            session_limits or SessionLimits(),
            answer=self._answer_turn,
            check=self._check_alive,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mailboxes = Mailboxes()
        self._ended = asyncio.Event()

    async def stream(
        self,
        prompt: str | Sequence[int],
        config: GenerationConfig,
        *,
        options: RequestOptions = NO_OPTIONS,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[StreamOutput, None]:
        """Yield what is generated: per choice, everything that arrived since its last yield.

        Closing the generator aborts the request and frees its pages; reading it too slowly pauses
        the request and in the end aborts it (ReaderLimits). After `timeout` seconds from this call,
        queued or running, the stream raises DeadlineError. Raises InvalidRequestError,
        QueueFullError or EngineDeadError before the first yield.
        """
        arrival, config = time.monotonic(), self.limits.completed(config)
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, str):
            prompt = await tokenise(self.tokenizer, prompt)
        request = await self._make(request_id, prompt, config, options, arrival, timeout)
        reader = self._submit(AnswerStream(request, self.tokenizer, text), request, timeout)
        try:
            while not reader.is_done:
                for output in await reader.take():
                    yield output
        finally:
            reader.close()

    async def _answer_turn(
        self,
        session: AsyncSession,
        config: GenerationConfig,
        options: RequestOptions,
        request_id: str | None,
        timeout: float | None,
    ) -> AsyncGenerator[StreamOutput, None]:
        """Stream the answer to the text of a session, which gets it all in the end."""
        arrival, ids = time.monotonic(), session.text.token_ids
        options = replace(options, cache_salt=session.text.options.cache_salt)
        request = await self._make(
            request_id, ids, config, options, arrival, timeout, num_checked=len(ids)
        )
        session.text.check_idle()  # nobody else came first while the grammar was compiled
        turn = Turn(session.text, request, session.end)
        session.begin()
        answer, num_tokens = AnswerStream(turn.request, self.tokenizer, None), 0
        try:
            reader = self._submit(answer, turn.request, timeout, turn)
            try:
                while not reader.is_done:
                    for output in await reader.take():
                        num_tokens = output.num_output_tokens
                        yield output
            finally:
                reader.close()
        finally:
            turn.read(num_tokens if answer.is_done else None)

    def has(self, request_id: str) -> bool:
        """Whether the engine may still speak of a request of this id."""
        return request_id in self._mailboxes

    def abort(self, request_id: str) -> None:
        """End a request with finish_reason "abort"; an unknown id is ignored."""
        if self.has(request_id):  # else a list of ids made up would keep the engine from its steps
            self._link.abort(request_id)

    def forget_prefixes(self) -> None:
        """Drop every cached prompt prefix before the next step."""
        self._link.forget_prefixes()

    def watch_grammars(self, told: Callable[[float], None]) -> None:
        """Tell how many seconds each constraint took to compile; from any thread."""
        self._grammars.told = told

    def stats(self) -> CoreStats:
        """Give the engine's counts as of its last step."""
        return self._link.stats()

    def devices(self) -> DeviceReport | None:
        """Give what the engine last said of its devices."""
        return self._link.devices()

    @property
    def is_alive(self) -> bool:
        """Whether requests are still taken."""
        return self._link.is_alive

    async def wait_ended(self) -> None:
        """Return when the engine has ended, whether it was closed or died."""
        self._bind_to_running_loop()
        if self._link.is_alive:
            await self._ended.wait()

    async def close(self) -> None:
        """End the engine and wait until it has finished its step."""
        self._bind_to_running_loop()
        await asyncio.to_thread(self._link.close)

    def _bind_to_running_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            raise InvalidRequestError("an AsyncEngine serves one event loop at a time")
        self._loop = loop
        self._mailboxes.clear()
        self._ended = asyncio.Event()
        self._link.connect(loop, self._receive)

    async def _make(
        self,
        request_id: str | None,
        token_ids: Sequence[int],
        config: GenerationConfig,
        options: RequestOptions,
        arrival: float,
        timeout: float | None,
        num_checked: int = 0,
    ) -> Request:
        grammar = None
        if config.constraint is not None:
            grammar = await in_thread(0, partial(self._grammars.compile, config.constraint))
        return self.limits.resolve(
            request_id or uuid.uuid4().hex,
            token_ids,
            config,
            fresh_seed=secrets.randbits(64),
            arrival_time=arrival,
            deadline=None if timeout is None else arrival + timeout,
            options=options,
            grammar=grammar,
            num_checked=num_checked,
        )

    def _submit(
        self,
        answer: AnswerStream,
        request: Request,
        timeout: float | None,
        turn: Turn | None = None,
    ) -> AnswerReader:
        try:
            self._check_alive()
            self._mailboxes.check_new(request)
        except SwiftJaxError:
            if turn is not None:
                turn.fall_silent()
            raise
        mailbox = Mailbox(request, self._link, self.reader_limits, turn)
        self._mailboxes[request.request_id] = mailbox
        self._link.submit(request)
        return AnswerReader(answer, request, mailbox, self._link, timeout)

    def _check_alive(self) -> None:
        self._bind_to_running_loop()
        if not self._link.is_alive:
            raise EngineDeadError("the engine has ended; restart it")

    def _receive(self, news: News) -> None:
        if self._watch is not None:
            self._watch(news.report)
        self._mailboxes.deliver(news)
        for done in news.sessions:
            self.sessions.take(done)
        if news.ended is not None:
            error = EngineDeadError(f"the engine has ended ({news.ended}); try again later")
            self._mailboxes.fail(error)
            self.sessions.fail(error)
            self._ended.set()
