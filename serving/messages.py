"""Between proto messages and our values, both ways. No I/O, no engine; limits are checked here.

Whatever a message may hold is counted before it is copied, so that a hostile one costs nothing.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from swiftjax import __version__
from swiftjax.engine.checks import check_room
from swiftjax.engine.limits import EngineLimits
from swiftjax.engine.request import FinishReason, StreamOutput
from swiftjax.engine.tokenizer import Tokenizer
from swiftjax.errors import InvalidRequestError, NotFoundError
from swiftjax.model_config import ModelConfig
from swiftjax.serving.options import TokenScore, read_logprobs, write_logprobs
from swiftjax.serving.proto import swiftjax_pb2 as pb

# The limit of one message in both directions, on the server and on our client.
MAX_MESSAGE_BYTES = 16 * 2**20
# No tokenizer packs more characters into a token than this (runs of blanks), so a longer text
# cannot fit the model; it is refused before tokenising it takes seconds.
MAX_CHARS_PER_TOKEN = 128
# A second of work; longer than the context of any model here.
MAX_DETOKENIZE_IDS = 2**20

FINISH_REASONS: dict[FinishReason, pb.FinishReason] = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
    "time_limit": pb.FINISH_REASON_TIME_LIMIT,
    "error": pb.FINISH_REASON_ERROR,
}
_FINISH_REASON_NAMES: dict[int, FinishReason] = {
    number: name for name, number in FINISH_REASONS.items()
}

ChatMessages = Sequence[Mapping[str, str]]


class Delta(NamedTuple):
    """What a client gets of one choice: new text, ids and scores; at last why it ended, totals."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    matched_stop: str | int | None
    num_prompt_tokens: int | None
    num_output_tokens: int | None
    num_cached_tokens: int | None
    index: int = 0
    logprobs: tuple[TokenScore, ...] = ()
    prompt_logprobs: tuple[TokenScore, ...] = ()


def check_model(asked: str, served: str) -> None:
    """Raise NotFoundError unless the model is left open or is the one that is served."""
    if asked not in ("", served):
        raise NotFoundError(f"model {asked!r:.100} is not served here; {served!r} is")


def check_text(num_chars: int, max_model_len: int) -> None:
    """Raise InvalidRequestError for a text that cannot fit, whatever the tokenizer makes of it."""
    limit = max_model_len * MAX_CHARS_PER_TOKEN
    if num_chars > limit:
        raise InvalidRequestError(
            f"the prompt has {num_chars} characters; a model of {max_model_len} tokens takes at "
            f"most {limit}: shorten it"
        )


def read_chat(chat: pb.Chat, max_model_len: int) -> list[dict[str, str]]:
    """Read a conversation as the chat template takes it."""
    if not chat.messages:
        raise InvalidRequestError("chat has no messages: give at least one")
    if len(chat.messages) > max_model_len:
        raise InvalidRequestError(
            f"chat has {len(chat.messages)} messages; a model of {max_model_len} tokens takes "
            "fewer: drop the oldest"
        )
    check_text(sum(len(m.role) + len(m.content) for m in chat.messages), max_model_len)
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidRequestError(f"chat message {index} has no role: set it, e.g. to 'user'")
    return [{"role": m.role, "content": m.content} for m in chat.messages]


def read_token_ids(token_ids: pb.TokenIds, max_model_len: int) -> tuple[int, ...]:
    """Read prompt ids, refusing what is too long before it is copied."""
    check_room(len(token_ids.ids), max_model_len)
    return tuple(token_ids.ids)


def read_content(
    request: pb.GenerateRequest | pb.AppendSessionRequest, max_model_len: int
) -> str | tuple[int, ...] | list[dict[str, str]] | None:
    """Read text, ids or messages as they are, None where none are set."""
    kind = request.WhichOneof("prompt")
    if kind == "text":
        check_text(len(request.text), max_model_len)
        return request.text
    if kind == "token_ids":
        return read_token_ids(request.token_ids, max_model_len)
    return read_chat(request.chat, max_model_len) if kind == "chat" else None


def read_vocabulary_ids(token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """Read ids that must name tokens."""
    if len(token_ids) > MAX_DETOKENIZE_IDS:
        raise InvalidRequestError(
            f"{len(token_ids)} token ids; at most {MAX_DETOKENIZE_IDS} are taken in one call"
        )
    ids = list(token_ids)
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"token id {token_id} is outside the vocabulary [0, {vocab_size})"
            )
    return ids


def write_output(output: StreamOutput, *, with_logprobs: bool = False) -> pb.GenerateResponse:
    """Write one delta; the last one of a choice carries the reason and the totals."""
    # Fields that are seldom set are left out: naming them takes as long as the others.
    response = pb.GenerateResponse(
        request_id=output.request_id, text=output.text, token_ids=output.token_ids
    )
    if output.index:
        response.index = output.index
    if with_logprobs:
        response.logprobs.extend(write_logprobs(output.logprobs, output.top_logprobs))
    if output.prompt is not None:
        response.prompt_logprobs.extend(write_logprobs(*output.prompt))
    if output.finish_reason is not None:
        response.finish_reason = FINISH_REASONS[output.finish_reason]
        response.usage.prompt_tokens = output.num_prompt_tokens
        response.usage.output_tokens = output.num_output_tokens
        response.usage.cached_tokens = output.num_cached_tokens
        if isinstance(output.matched_stop, str):
            response.stop_string = output.matched_stop
        elif output.matched_stop is not None:
            response.stop_token_id = output.matched_stop
    return response


def read_response(response: pb.GenerateResponse) -> Delta:
    """Read one delta on the client's side; a reason newer than this client reads as "error"."""
    reason = None
    if is_last := response.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
        reason = _FINISH_REASON_NAMES.get(response.finish_reason, "error")
    matched = response.WhichOneof("matched_stop")
    return Delta(
        text=response.text,
        token_ids=tuple(response.token_ids),
        finish_reason=reason,
        matched_stop=None if matched is None else getattr(response, matched),
        num_prompt_tokens=response.usage.prompt_tokens if is_last else None,
        num_output_tokens=response.usage.output_tokens if is_last else None,
        num_cached_tokens=response.usage.cached_tokens if is_last else None,
        index=response.index,
        logprobs=read_logprobs(response.logprobs),
        prompt_logprobs=read_logprobs(response.prompt_logprobs),
    )


def describe_model(
    name: str,
    config: ModelConfig,
    limits: EngineLimits,
    tokenizer: Tokenizer,
    version: str = "",
) -> pb.GetModelResponse:
    """Write what GetModel answers; `version` tells these weights from those before."""
    return pb.GetModelResponse(
        name=name,
        family=config.family,
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        eos_token_ids=limits.eos_token_ids,
        bos_token_id=config.bos_token_id,
        dtype=config.dtype or "",
        has_chat_template=tokenizer.has_chat_template,
        server_version=__version__,
        version=version,
        quantization=config.quantization.kind if config.quantization else "",
    )
