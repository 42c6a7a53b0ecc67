"""From what a caller of our clients gives to messages of swiftjax.v1; both clients use it."""

import uuid
from collections.abc import Sequence

from swiftjax.engine.request import GenerationConfig, RequestOptions
from swiftjax.engine.streaming import Streaming
from swiftjax.errors import InvalidRequestError
from swiftjax.serving.messages import ChatMessages
from swiftjax.serving.options import write_options, write_request_options, write_streaming
from swiftjax.serving.proto import swiftjax_pb2 as pb


def make_request(
    text: str | None,
    messages: ChatMessages | None,
    token_ids: Sequence[int] | None,
    config: GenerationConfig | None,
    options: RequestOptions,
    request_id: str,
    session: str,
) -> pb.GenerateRequest:
    """Write a request; raises InvalidRequestError unless it has a prompt, or in a session none."""
    # grpc may send a call again whose answer was lost: the turn must not be added twice.
    turn_id = uuid.uuid4().hex if session else ""
    request = pb.GenerateRequest(request_id=request_id, session=session, turn_id=turn_id)
    num_prompts = sum(prompt is not None for prompt in (text, messages, token_ids))
    if num_prompts > 1 or not (num_prompts or session):
        raise InvalidRequestError("give exactly one of text, messages and token_ids")
    if text is not None:
        request.text = text
    elif messages is not None:
        request.chat.CopyFrom(_chat(messages))
    elif token_ids is not None:
        request.token_ids.ids.extend(token_ids)
        request.token_ids.SetInParent()
    if config is not None:
        write_options(config, request)
    write_request_options(options, request)
    return request


def make_tokenize(text: str | None, messages: ChatMessages | None) -> pb.TokenizeRequest:
    """Write what is to be tokenised; raises InvalidRequestError unless it is one thing."""
    if (text is None) == (messages is None):
        raise InvalidRequestError("give exactly one of text and messages")
    if messages is not None:
        return pb.TokenizeRequest(chat=_chat(messages))
    return pb.TokenizeRequest(text=text)


def _chat(messages: ChatMessages) -> pb.Chat:
    return pb.Chat(
        messages=[pb.ChatMessage(role=m["role"], content=m["content"]) for m in messages]
    )


def make_open_session(streaming: Streaming | None, seed: int | None) -> pb.OpenSessionRequest:
    """Write what holds for all turns of a session."""
    request = pb.OpenSessionRequest(seed=seed)
    if streaming is not None:
        write_streaming(streaming, request.streaming)
    return request
