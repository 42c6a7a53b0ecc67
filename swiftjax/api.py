"""The blocking `Engine`: what a script imports.

It stands on the same EngineCore as everything concurrent, runs it in the caller's thread, and
shares detokenizing and stop strings with the AsyncEngine.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import numpy as np

from swiftjax.build import BuiltCore, build_core
from swiftjax.config import (
    EngineConfig,
    KVCacheDtype,
    PromptAttention,
    QueuePolicyChoice,
    VictimPolicyName,
)
from swiftjax.engine.answer_ledger import AnswerLedger
from swiftjax.engine.request import (
    MAX_TOKENS,
    NO_OPTIONS,
    GenerationConfig,
    Prompt,
    Request,
    RequestOptions,
    RequestOutput,
    StepOutput,
)
from swiftjax.engine.request_maker import RequestMaker, read_prompts
from swiftjax.engine.session import SessionText, Turn, new_session_id
from swiftjax.engine.session_file import load_session
from swiftjax.engine.streaming import Streaming
from swiftjax.errors import InvalidRequestError, SwiftJaxError
from swiftjax.model_config import Dtype
from swiftjax.quantization import Quantization
from swiftjax.sessions import Session


class Engine:
    """The blocking engine: one caller, one thread.

    `generate` answers prompts; `add_request`, `step`, `is_request_finished` and
    `get_completed_requests` are the same engine one step at a time. `max_total_token_num` is the
    size of the KV cache in tokens and `max_batch_size` the number of requests that run together;
    None leaves a choice to the device and the checkpoint. `group_prompts` has many prompts answered
    sooner, though single ones wait for others at times (docs/scheduler.md). `warm_up` compiles
    every step at once, by default on a GPU; otherwise each is compiled when it is first needed,
    which is sooner done for a short script, and what is preempted is computed again, never swapped,
    unless `engine.built.measure_swap()` was called.
    """

    def __init__(
        self,
        model_path: str,
        *,
        max_batch_size: int | None = None,
        max_total_token_num: int | None = None,
        gpu_memory_utilization: float = 0.9,
        max_model_len: int | None = None,
        dtype: Dtype | None = None,
        quantization: Quantization | None = None,
        kv_cache_dtype: KVCacheDtype = "auto",
        page_size: int | None = None,
        max_num_batched_tokens: int | None = None,
        implementation: str | None = None,
        prompt_attention: PromptAttention = "paged",
        chat_template: str | None = None,
        policy: QueuePolicyChoice = "fcfs",
        victim_policy: VictimPolicyName | None = None,
        group_prompts: bool = True,
        prefix_cache: bool = True,
        deterministic: bool = False,
        streaming: bool = False,
        swap_space_gib: float = 4.0,
        trace: str | None = None,
        warm_up: bool | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        config = EngineConfig(
            model_path=model_path,
            max_batch_size=max_batch_size,
            max_total_token_num=max_total_token_num,
            gpu_memory_utilization=gpu_memory_utilization,
            max_model_len=max_model_len,
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            page_size=page_size,
            max_num_batched_tokens=max_num_batched_tokens,
            implementation=implementation,
            prompt_attention=prompt_attention,
            chat_template=chat_template,
            policy=policy,
            victim_policy=victim_policy,
            group_prompts=group_prompts,
            prefix_cache=prefix_cache,
            deterministic=deterministic,
            streaming=streaming,
            swap_space_gib=swap_space_gib,
            trace=trace,
            max_queue_len=MAX_TOKENS,  # whoever calls a blocking engine is the only one to wait
        )
        built = build_core(config, progress, warms_up=warm_up)
        if built.is_on_gpu if warm_up is None else warm_up:
            built.warm_up()
        self._take(built)

    @classmethod
    def from_core(cls, built: BuiltCore) -> "Engine":
        """Wrap a core that `build_core` made."""
        engine = cls.__new__(cls)
        engine._take(built)
        return engine

    def _take(self, built: BuiltCore) -> None:
        self.built = built
        self.tokenizer = built.tokenizer
        self._maker = RequestMaker(built.tokenizer, built.core.limits)
        self._core = built.core
        self._answers = AnswerLedger(built.tokenizer)
        self._turns: dict[str, Turn] = {}  # of sessions, until the engine's last word

    def generate(
        self,
        prompts: str | SequenceOf[Prompt] | SequenceOf[int] | np.ndarray | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        input_ids: SequenceOf[SequenceOf[int]] | SequenceOf[int] | np.ndarray | None = None,
        options: RequestOptions = NO_OPTIONS,
    ) -> list[RequestOutput]:
        """Answer one prompt or several together; one RequestOutput each, in order.

        A prompt is text or token ids. Text is tokenised as it stands: render chat messages with
        `engine.tokenizer.apply_chat_template` first. Raises InvalidRequestError for any bad prompt
        before the first token of any is computed.
        """
        items = read_prompts(prompts, input_ids)
        config = self._core.limits.completed(generation_config or GenerationConfig())
        requests = [self._maker.make(p, config, options) for p in items]
        request_ids = self._submit_all(requests, items)
        self._step_until(lambda: self._answers.are_complete(request_ids))
        return [self._answers.take(request_id) for request_id in request_ids]

    def add_request(
        self,
        prompt: Prompt,
        gen_config: GenerationConfig | None = None,
        *,
        options: RequestOptions = NO_OPTIONS,
        request_id: str | None = None,
    ) -> str:
        """Queue one request and return its id."""
        config = self._core.limits.completed(gen_config or GenerationConfig())
        return self._submit(self._maker.make(prompt, config, options, request_id), prompt)

    def abort_request(self, request_id: str) -> None:
        """End a request; what it made so far comes out as completed, with reason "abort"."""
        self._core.abort(request_id)

    def open_session(
        self,
        *,
        streaming: Streaming | None = None,
        seed: int | None = None,
        options: RequestOptions = NO_OPTIONS,
    ) -> Session:
        """Open a conversation that keeps its pages from turn to turn (docs/sessions.md)."""
        limits = self._core.limits
        streaming = streaming or limits.default_streaming
        return self._session(SessionText(limits, streaming=streaming, seed=seed, options=options))

    def restore_session(self, path: str | Path) -> Session:
        """Go on with a session from a file that `Session.save` wrote, here or elsewhere.

        Raises InvalidRequestError, naming the file, if it was altered or is of another model.
        """
        session_id, pages = new_session_id(), self._core.sessions
        state = load_session(pages, session_id, Path(path))
        try:
            return self._session(SessionText.of(self._core.limits, session_id, state))
        except InvalidRequestError:
            pages.close(session_id)
            raise

    def _session(self, text: SessionText) -> Session:
        return Session(text, self.tokenizer, self._core.sessions, self._answer_turn)

    def _answer_turn(self, text: SessionText, config: GenerationConfig) -> RequestOutput:
        turn = Turn(text, self._maker.make(text.token_ids, config, text.options))
        request_id = turn.request.request_id
        try:
            self._submit(turn.request, turn.request.prompt_token_ids)
        except SwiftJaxError:
            turn.fall_silent()
            turn.read()
            raise
        self._turns[request_id] = turn
        try:
            self._step_until(lambda: self._answers.is_complete(request_id))
            turn.read(len(self._answers.peek(request_id).token_ids))
        except BaseException:
            self._core.abort(request_id)
            turn.read()
            raise
        finally:
            self._step_until(lambda: not text.is_busy)
            answer = self._answers.take(request_id)
        return answer

    def _step_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self.step()

    def step(self) -> list[StepOutput]:
        """Compute a token for running requests, or prompts they wait for; what each got."""
        outputs = self._core.step()
        for output in outputs:
            if (turn := self._turns.get(output.request_id)) is not None:
                turn.record(output)
                if output.finish_reason is not None:
                    del self._turns[output.request_id]
            if self._answers.add(output):
                self._core.abort(output.request_id, output.index)
        return outputs

    def is_request_finished(self, request_id: str) -> bool:
        """Whether its answer is complete; raises NotFoundError for an id never given out."""
        return self._answers.is_complete(request_id)

    def get_completed_requests(self) -> list[RequestOutput]:
        """Hand over the answers completed since the last call, each once."""
        return self._answers.take_all()

    def _submit_all(self, requests: list[Request], prompts: list[Prompt]) -> list[str]:
        submitted: list[str] = []
        try:
            for request, prompt in zip(requests, prompts, strict=True):
                submitted.append(self._submit(request, prompt))
        except SwiftJaxError:
            for request_id in submitted:
                self._core.abort(request_id)
                self._answers.forget(request_id)
            raise
        return submitted

    def _submit(self, request: Request, prompt: Prompt) -> str:
        self._answers.check_free(request.request_id)
        self._core.submit(request)
        self._answers.open(request, prompt)
        return request.request_id
