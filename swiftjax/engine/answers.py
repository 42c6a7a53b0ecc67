"""From step outputs to what a client reads: text, tokens and scores, choice by choice.

The blocking engine and the asynchronous one both read answers through this. Knows no engine.
"""

from collections.abc import Sequence as SequenceOf

from swiftjax.engine.detokenizer import TextDelta, TextStream
from swiftjax.engine.request import (
    PromptLogprobs,
    Request,
    StepOutput,
    StreamOutput,
    TopLogprobs,
)
from swiftjax.engine.tokenizer import Tokenizer


class AnswerStream:
    """Joins the step outputs of one request into deltas."""

    def __init__(self, request: Request, tokenizer: Tokenizer, prompt_text: str | None) -> None:
        """`prompt_text` is what an echo shows; None shows the text of the prompt's tokens."""
        generation = request.generation
        echo = ""
        if generation.echo:
            echo = prompt_text or tokenizer.decode(list(request.prompt_token_ids))
        self._num_open = generation.n
        self._choices = [
            _ChoiceStream(request, index, TextStream(tokenizer, generation), echo)
            for index in range(generation.n)
        ]

    @property
    def is_done(self) -> bool:
        """Whether every choice has ended."""
        return self._num_open == 0

    def merge(self, outputs: SequenceOf[StepOutput]) -> list[StreamOutput]:
        """One delta for each choice that these outputs speak of.

        Outputs after the end of a choice are dropped: a stop string ends it before the engine can.
        """
        if len(self._choices) == 1:
            return self._merge(self._choices[0], outputs)
        deltas = []
        for choice in self._choices:
            mine = [output for output in outputs if output.index == choice.index]
            deltas += self._merge(choice, mine)
        return deltas

    def _merge(
        self, choice: "_ChoiceStream", outputs: SequenceOf[StepOutput]
    ) -> list[StreamOutput]:
        if choice.is_done or not outputs:
            return []
        delta = choice.merge(outputs)
        self._num_open -= choice.is_done
        return [delta]


class _ChoiceStream:
    def __init__(self, request: Request, index: int, text: TextStream, echo: str) -> None:
        self.index = index
        self.is_done = False
        self._request = request
        self._text = text
        self._echo = echo
        self._num_output_tokens = 0
        self._num_cached_tokens = 0

    def merge(self, outputs: SequenceOf[StepOutput]) -> StreamOutput:
        """Join outputs up to the one that ends the choice."""
        if len(outputs) == 1:  # as nearly all are: nothing to join
            (output,) = outputs
            delta = self._push(output)
            return self._write(
                delta,
                delta.text,
                output.token_ids,
                output.logprobs,
                output.top_logprobs,
                output.prompt,
            )
        texts: list[str] = []
        token_ids: list[int] = []
        logprobs: list[float] = []
        top: list[TopLogprobs] = []
        prompt: PromptLogprobs | None = None
        for output in outputs:
            delta = self._push(output)
            texts.append(delta.text)
            token_ids += output.token_ids
            logprobs += output.logprobs
            top += output.top_logprobs
            prompt = prompt or output.prompt
            if self.is_done:
                break
        return self._write(
            delta, "".join(texts), tuple(token_ids), tuple(logprobs), tuple(top), prompt
        )

    def _push(self, output: StepOutput) -> TextDelta:
        # The last output may come without it: the request was aborted, or its time was up.
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        delta = self._text.push(output.token_ids, output.finish_reason)
        self.is_done = delta.finish_reason is not None
        return delta

    def _write(
        self,
        last: TextDelta,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[float, ...],
        top_logprobs: tuple[TopLogprobs, ...],
        prompt: PromptLogprobs | None,
    ) -> StreamOutput:
        echo, self._echo = self._echo, ""
        self._num_output_tokens += len(token_ids)
        return StreamOutput(
            request_id=self._request.request_id,
            text=echo + text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=last.finish_reason,
            num_prompt_tokens=len(self._request.prompt_token_ids),
            num_output_tokens=self._num_output_tokens,
            matched_stop=last.matched_stop,
            index=self.index,
            top_logprobs=top_logprobs,
            prompt=prompt,
            num_cached_tokens=self._num_cached_tokens,
        )
