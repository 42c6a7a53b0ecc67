"""Makes requests of what a caller of the blocking engine gives: texts, token ids, arrays.

Tokenises, compiles grammars and checks limits, in the caller's thread. Called by `swiftjax/api.py`.
"""

import itertools
import secrets
import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np

from swiftjax.engine.generation import GenerationConfig
from swiftjax.engine.grammar import GrammarCompiler
from swiftjax.engine.limits import EngineLimits
from swiftjax.engine.request import Prompt, Request
from swiftjax.engine.request_options import RequestOptions
from swiftjax.engine.tokenizer import Tokenizer
from swiftjax.errors import InvalidRequestError


class RequestMaker:
    """Knows the tokenizer and the limits of one engine."""

    def __init__(self, tokenizer: Tokenizer, limits: EngineLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._grammars = GrammarCompiler(
            tokenizer.files.tokenizer_json, limits.vocab_size, limits.eos_token_ids
        )
        self._ids = itertools.count()

    def make(
        self,
        prompt: Prompt,
        config: GenerationConfig,
        options: RequestOptions,
        request_id: str | None = None,
    ) -> Request:
        """A checked request that arrives now; raises InvalidRequestError for what cannot run."""
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        constraint = config.constraint
        return self._limits.resolve(
            request_id or f"request-{next(self._ids)}",
            [int(i) if isinstance(i, np.integer) else i for i in ids],
            config,
            fresh_seed=secrets.randbits(64),
            arrival_time=time.monotonic(),
            options=options,
            grammar=None if constraint is None else self._grammars.compile(constraint),
        )


def read_prompts(prompts: object, input_ids: object) -> list[Prompt]:
    """One prompt or several, as a list; an array of ids counts as one prompt for every row.

    Raises InvalidRequestError for anything else, and unless one of the two is given.
    """
    if (prompts is None) == (input_ids is None):
        raise InvalidRequestError("give either prompts or input_ids")
    prompts = input_ids if prompts is None else prompts
    if isinstance(prompts, str):
        return [prompts]
    items = prompts.tolist() if isinstance(prompts, np.ndarray) else prompts
    if isinstance(items, Mapping) or not isinstance(items, SequenceOf):
        raise InvalidRequestError(
            f"prompts must be text, token ids or a list of these, not {type(prompts).__name__}"
        )
    return [list(items)] if items and all(isinstance(i, int) for i in items) else list(items)
