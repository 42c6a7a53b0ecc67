"""Between VllmEngine's messages and our values. Fields that are not optional read 0 when unset."""

from collections.abc import Sequence
from typing import Any

import msgspec
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from swiftjax.engine.checks import check_count
from swiftjax.engine.constraint import Constraint
from swiftjax.engine.generation import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from swiftjax.engine.request import (
    FinishReason,
    GenerationConfig,
    PromptLogprobs,
    StreamOutput,
    TopLogprobs,
)
from swiftjax.errors import InvalidRequestError
from swiftjax.serving.messages import check_text

# The gateway knows no others; what a time limit ended is told as if it was aborted.
FINISH_REASONS: dict[FinishReason, str] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
    "time_limit": "abort",
    "error": "error",
}


def read_prompt(request: pb.GenerateRequest, max_model_len: int) -> str | list[int]:
    """Read the prompt; `truncate_prompt_tokens` keeps that many of its last ids."""
    kind = request.WhichOneof("input")
    if kind == "text":
        check_text(len(request.text), max_model_len)
        return request.text
    if kind != "tokenized":
        raise InvalidRequestError("no prompt: set tokenized or text")
    ids = request.tokenized.input_ids
    keep = request.sampling_params.truncate_prompt_tokens
    if request.sampling_params.HasField("truncate_prompt_tokens"):
        keep = max_model_len - 1 if keep < 0 else keep
        ids = ids[-keep:] if keep else ids
    if len(ids) >= max_model_len:
        raise InvalidRequestError(
            f"the prompt has {len(ids)} tokens; max_model_len is {max_model_len}, which must hold "
            f"the prompt and at least one new token: shorten it to {max_model_len - 1}"
        )
    return list(ids)


def read_config(params: pb.SamplingParams) -> GenerationConfig:
    """Read the options; raises InvalidRequestError for what is out of range or not built."""
    check_count("stop strings", len(params.stop), MAX_STOP_STRINGS)
    check_count("stop token ids", len(params.stop_token_ids), MAX_STOP_TOKEN_IDS)
    check_count("logit_bias entries", len(params.logit_bias), MAX_LOGIT_BIAS)
    return GenerationConfig(
        max_new_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        min_new_tokens=params.min_tokens,
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_p=params.top_p or 1.0,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty or 1.0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple(params.logit_bias.items()),
        seed=params.seed % 2**64 if params.HasField("seed") else None,
        n=params.n or 1,
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        include_stop_str=params.include_stop_str_in_output,
        ignore_eos=params.ignore_eos,
        logprobs=_count(params, "logprobs"),
        prompt_logprobs=_count(params, "prompt_logprobs"),
        constraint=_read_constraint(params),
    )


def _read_constraint(params: pb.SamplingParams) -> Constraint | None:
    match kind := params.WhichOneof("constraint"):
        case "json_schema" | "regex" | "grammar":
            return Constraint(kind=kind, text=getattr(params, kind))
        case "json_object":
            return Constraint(kind="json_object") if params.json_object else None
        case "choice":
            return Constraint(kind="choice", choices=tuple(params.choice.choices))
        case None:
            return None
    raise InvalidRequestError(f"{kind} is not supported")


def _count(params: pb.SamplingParams, name: str) -> int | None:
    """How many most likely tokens; -1 asks for all, which is cut to what there can be."""
    if not params.HasField(name):
        return None
    value = getattr(params, name)
    return MAX_LOGPROBS if value == -1 else value


class AnswerWriter:
    """What one request is answered with: deltas, and at the end of a choice its totals."""

    def __init__(self, prompt: str | list[int], config: GenerationConfig, *, stream: bool) -> None:
        self._prompt_ids = [] if isinstance(prompt, str) else prompt
        self._with_logprobs = config.logprobs is not None
        self._stream = stream
        self._whole: dict[int, StreamOutput] = {}

    def write(self, output: StreamOutput) -> list[pb.GenerateResponse]:
        """Write what is new of one choice; without streaming nothing until its end."""
        if not self._stream:
            known = self._whole.get(output.index)
            output = self._whole[output.index] = _joined(known, output) if known else output
        responses = []
        if self._stream and output.token_ids:
            chunk = pb.GenerateStreamChunk(token_ids=output.token_ids, **self._common(output))
            responses.append(pb.GenerateResponse(chunk=chunk))
        if output.finish_reason is not None:
            responses.append(pb.GenerateResponse(complete=self._complete(output)))
        return responses

    def _complete(self, output: StreamOutput) -> pb.GenerateComplete:
        # A gateway that streams has put the chunks together itself.
        fields = self._common(output)
        if self._stream:
            fields |= {"output_logprobs": None, "input_logprobs": None}
        assert output.finish_reason is not None
        complete = pb.GenerateComplete(
            output_ids=() if self._stream else output.token_ids,
            finish_reason=FINISH_REASONS[output.finish_reason],
            **fields,
        )
        if isinstance(output.matched_stop, str):
            complete.matched_stop_str = output.matched_stop
        elif output.matched_stop is not None:
            complete.matched_token_id = output.matched_stop
        return complete

    def _common(self, output: StreamOutput) -> dict[str, Any]:
        return {
            "prompt_tokens": output.num_prompt_tokens,
            "completion_tokens": output.num_output_tokens,
            "cached_tokens": output.num_cached_tokens,
            "index": output.index,
            "output_logprobs": self._scores(output) if self._with_logprobs else None,
            "input_logprobs": self._prompt_scores(output.prompt) if output.prompt else None,
        }

    def _scores(self, output: StreamOutput) -> pb.OutputLogProbs:
        return pb.OutputLogProbs(
            token_logprobs=output.logprobs,
            token_ids=output.token_ids,
            top_logprobs=_tops(output.top_logprobs),
        )

    def _prompt_scores(self, prompt: PromptLogprobs) -> pb.InputLogProbs:
        return pb.InputLogProbs(
            token_logprobs=[pb.InputTokenLogProb(value=value) for value in prompt.logprobs],
            token_ids=self._prompt_ids,
            top_logprobs=_tops(prompt.top_logprobs),
        )


def _tops(tops: Sequence[TopLogprobs]) -> list[pb.TopLogProbs]:
    return [
        pb.TopLogProbs(values=[value for _, value in top], token_ids=[i for i, _ in top])
        for top in tops
    ]


def _joined(before: StreamOutput, after: StreamOutput) -> StreamOutput:
    return msgspec.structs.replace(
        after,
        token_ids=before.token_ids + after.token_ids,
        logprobs=before.logprobs + after.logprobs,
        top_logprobs=before.top_logprobs + after.top_logprobs,
        prompt=before.prompt or after.prompt,
    )
