"""Endpoints that only turn texts and chats into token ids and back."""

from collections.abc import Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from swiftjax.engine.text_threads import CHARS_PER_ID, in_thread, tokenise
from swiftjax.serving.http.bodies import DetokenizeBody, TokenizeBody
from swiftjax.serving.http.gated import Endpoint
from swiftjax.serving.http.json_body import FieldError, read_body
from swiftjax.serving.http.logprobs import token_text
from swiftjax.serving.http.prompts import render
from swiftjax.serving.http.replies import JsonReply
from swiftjax.serving.http.tools import offer
from swiftjax.serving.messages import check_model, read_vocabulary_ids
from swiftjax.serving.served import Served


class TokenRoutes:
    """`served` gives what is served by now."""

    def __init__(self, served: Callable[[], Served]) -> None:
        self._served = served

    def paths(self) -> list[tuple[str, str, Endpoint]]:
        """Give method, path and endpoint of each."""
        return [
            ("GET", "/tokenizer_info", self.tokenizer_info),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
        ]

    async def tokenize(self, request: Request) -> Response:
        """Turn a text or a chat into token ids."""
        body = read_body(await request.body(), TokenizeBody)
        engine, model = self._served()[:2]
        check_model(body.model or "", model.name)
        if (body.prompt is None) == (body.messages is None):
            raise FieldError("give exactly one of prompt and messages", "prompt")
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            ids = await tokenise(engine.tokenizer, body.prompt, special)
        else:
            ids = await render(
                engine.tokenizer,
                body.messages or (),
                engine.limits.max_model_len,
                tools=offer(body.tools or ()),
                add_generation_prompt=body.add_generation_prompt is not False,
            )
        count = {"count": len(ids), "max_model_len": engine.limits.max_model_len}
        return JsonReply({"tokens": ids, **count})

    async def detokenize(self, request: Request) -> Response:
        """Turn token ids into text."""
        body = read_body(await request.body(), DetokenizeBody)
        engine, model = self._served()[:2]
        check_model(body.model or "", model.name)
        ids = read_vocabulary_ids(body.tokens, engine.limits.vocab_size)
        skip = body.skip_special_tokens is not False
        decode = partial(engine.tokenizer.decode, ids, skip)
        text = await in_thread(len(ids) * CHARS_PER_ID, decode)
        return JsonReply({"prompt": text})

    async def tokenizer_info(self, request: Request) -> Response:
        """Name the special tokens, for clients that count tokens by asking us."""
        tokenizer = self._served().engine.tokenizer
        ids = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
        names = {key: None if i is None else token_text(tokenizer, i) for key, i in ids.items()}
        return JsonReply(names | {"model_max_length": self._served().engine.limits.max_model_len})
