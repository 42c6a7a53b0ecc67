"""From what the engine streams to OpenAI's JSON, streamed in chunks or whole.

One writer per request; it counts tokens and remembers what each choice has sent. Does no I/O.
"""

import time
from typing import Any

from swiftjax.engine.request import FinishReason, GenerationConfig, Prompt, StreamOutput
from swiftjax.engine.tokenizer import Tokenizer
from swiftjax.serving.http.logprobs import Columns, shown_scores, token_list
from swiftjax.serving.http.tools import ToolUse, join_calls, write_call
from swiftjax.serving.tools.calls import CallReader

# OpenAI's clients know no reason but these; `swiftjax_finish_reason` beside it tells the truth.
FINISH_REASONS: dict[FinishReason, str] = {
    "stop": "stop",
    "length": "length",
    "abort": "stop",
    "time_limit": "stop",
    "error": "stop",
}

Json = dict[str, Any]


class AnswerWriter:
    """What completions and chats have in common."""

    kind = ""  # of the whole answer, as "object" names it
    chunk_kind = ""

    def __init__(
        self, answer_id: str, model: str, tokenizer: Tokenizer, config: GenerationConfig
    ) -> None:
        self._head = {"id": answer_id, "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._config = config
        self._num_prompt_tokens: dict[int, int] = {}
        self._num_cached_tokens: dict[int, int] = {}
        self._num_output_tokens: dict[int, int] = {}
        self._whole: dict[int, list[Json]] = {}
        self._begun: set[int] = set()

    def count(self, prompt_index: int, output: StreamOutput) -> int:
        """Count the tokens of what is new; gives the number of its choice among all."""
        index = prompt_index * self._config.n + output.index
        self._num_prompt_tokens[prompt_index] = output.num_prompt_tokens
        if output.index == 0:  # the others share its pages, which is no merit of the cache
            self._num_cached_tokens[prompt_index] = output.num_cached_tokens
        self._num_output_tokens[index] = output.num_output_tokens
        return index

    def chunks(self, index: int, output: StreamOutput) -> list[Json]:
        """Write what is new of a choice as the chunks that tell it."""
        return [self._chunk([choice]) for choice in self._deltas(index, output)]

    def is_plain(self, index: int, output: StreamOutput) -> bool:
        """Whether it is one chunk, which differs from others of its choice by its text only."""
        has_text = output.text and output.finish_reason is None
        return bool(has_text) and self._config.logprobs is None

    def usage_chunk(self) -> Json:
        """Write the last chunk of a stream that was asked for usage."""
        return self._chunk([]) | {"usage": self.usage()}

    def add(self, prompt_index: int, output: StreamOutput) -> None:
        """Take what is new of one choice for the whole answer."""
        index = self.count(prompt_index, output)
        self._whole.setdefault(index, []).extend(self._deltas(index, output))

    def whole(self) -> Json:
        """Write the whole answer from all that was added."""
        choices = [self._join(index, parts) for index, parts in sorted(self._whole.items())]
        return self._head | {"object": self.kind, "choices": choices, "usage": self.usage()}

    def usage(self) -> Json:
        """Count tokens; a prompt counts once, however many choices it has."""
        prompt = sum(self._num_prompt_tokens.values())
        output = sum(self._num_output_tokens.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached_tokens.values())},
        }

    def _chunk(self, choices: list[Json]) -> Json:
        return self._head | {"object": self.chunk_kind, "choices": choices}

    def _deltas(self, index: int, output: StreamOutput) -> list[Json]:
        raise NotImplementedError

    def _join(self, index: int, parts: list[Json]) -> Json:
        raise NotImplementedError


def _end(output: StreamOutput) -> Json:
    """How a choice ended, as far as it has."""
    reason = output.finish_reason
    if reason is None:
        return {"finish_reason": None}
    return {
        "finish_reason": FINISH_REASONS[reason],
        "swiftjax_finish_reason": reason,
        "stop_reason": output.matched_stop,
    }


class CompletionWriter(AnswerWriter):
    """POST /v1/completions. Knows the prompts, whose texts an echo repeats."""

    kind = chunk_kind = "text_completion"

    def __init__(
        self,
        answer_id: str,
        model: str,
        tokenizer: Tokenizer,
        config: GenerationConfig,
        prompts: list[Prompt],
        prompt_ids: list[list[int]],
    ) -> None:
        """`prompt_ids` are those of the prompts; needed where echoed ones have scores."""
        super().__init__(answer_id, model, tokenizer, config)
        self._prompts = prompts
        self._prompt_ids = prompt_ids
        self._columns: dict[int, Columns] = {}

    def _deltas(self, index: int, output: StreamOutput) -> list[Json]:
        scores = None if self._config.logprobs is None else self._scores(index, output)
        if not (output.text or output.finish_reason or (scores and scores["tokens"])):
            return []
        return [{"index": index, "text": output.text, "logprobs": scores} | _end(output)]

    def _scores(self, index: int, output: StreamOutput) -> dict[str, list[Any]]:
        parts = []
        if index not in self._columns:
            start = 0
            if output.prompt is not None:
                prompt, ids = self._prompts[index], self._prompt_ids[index]
                parts.append(Columns(self._tokenizer, 0).write(ids, *output.prompt))
                start = len(prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt))
            self._columns[index] = Columns(self._tokenizer, start)
        parts.append(self._columns[index].write(*shown_scores(output)))
        return _join_columns(parts)

    def _join(self, index: int, parts: list[Json]) -> Json:
        scores = [part["logprobs"] for part in parts]
        return parts[-1] | {
            "text": "".join(part["text"] for part in parts),
            "logprobs": None if self._config.logprobs is None else _join_columns(scores),
        }


def _join_columns(parts: list[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    return {name: [entry for part in parts for entry in part[name]] for name in parts[0]}


class ChatWriter(AnswerWriter):
    """POST /v1/chat/completions. `tools` says how an answer may hold calls."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        answer_id: str,
        model: str,
        tokenizer: Tokenizer,
        config: GenerationConfig,
        tools: ToolUse | None = None,
    ) -> None:
        super().__init__(answer_id, model, tokenizer, config)
        self._tools = tools
        self._readers: dict[int, CallReader] = {}

    def is_plain(self, index: int, output: StreamOutput) -> bool:
        """See above; the first chunk names a role, and calls of tools are no text."""
        return super().is_plain(index, output) and self._tools is None and index in self._begun

    def _deltas(self, index: int, output: StreamOutput) -> list[Json]:
        choices = []
        if index not in self._begun:
            self._begun.add(index)
            choices.append(_delta(index, {"role": "assistant", "content": ""}))
        scores = None
        if self._config.logprobs is not None and output.token_ids:
            entries = token_list(self._tokenizer, *shown_scores(output))
            scores = {"content": entries, "refusal": None} if entries else None
        news = self._read(index, output)
        if news or scores:
            choices.append(_delta(index, news or {"content": ""}) | {"logprobs": scores})
        if output.finish_reason is not None:
            end = _end(output)
            if output.finish_reason == "stop" and self._num_calls(index):
                end["finish_reason"] = "tool_calls"
            choices.append(_delta(index, {}) | end)
        return choices

    def _read(self, index: int, output: StreamOutput) -> Json:
        """Contents and calls that are new."""
        if self._tools is None:
            return {"content": output.text} if output.text else {}
        reader = self._readers.setdefault(index, self._tools.reader())
        read = reader.push(output.text, is_last=output.finish_reason is not None)
        news: Json = {"content": read.content} if read.content else {}
        if read.calls:
            news["tool_calls"] = [write_call(call) for call in read.calls]
        return news

    def _num_calls(self, index: int) -> int:
        return self._readers[index].num_calls if index in self._readers else 0

    def _join(self, index: int, parts: list[Json]) -> Json:
        end = {key: value for key, value in parts[-1].items() if key != "delta"}
        deltas = [part["delta"] for part in parts]
        text = "".join(delta.get("content", "") for delta in deltas)
        message = {"role": "assistant", "content": text, "refusal": None}
        if calls := join_calls([call for delta in deltas for call in delta.get("tool_calls", ())]):
            message |= {"content": text or None, "tool_calls": calls}
        entries = [e for part in parts if part["logprobs"] for e in part["logprobs"]["content"]]
        asked = self._config.logprobs is not None
        return end | {
            "message": message,
            "logprobs": {"content": entries, "refusal": None} if asked else None,
        }


def _delta(index: int, delta: Json) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
