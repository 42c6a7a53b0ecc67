"""Answers of a blocking engine: outputs are joined in pieces, and nothing shows of that."""

import gc

from hypothesis import given
from hypothesis import strategies as st

from swiftjax.engine.answers import AnswerStream
from swiftjax.engine.request import (
    FinishReason,
    GenerationConfig,
    Request,
    RequestOutput,
    StepOutput,
)
from swiftjax.engine.tokenizer import Tokenizer
from swiftjax.engine.whole_answer import PIECE, WholeAnswer

REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort")


def _request(generation: GenerationConfig) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=(1, 2, 3),
        generation=generation,
        max_new_tokens=10 * PIECE,
        stop_token_ids=frozenset(),
        seed=0,
        arrival_time=0.0,
    )


def _outputs(index: int, steps: list[list[int]], reason: FinishReason) -> list[StepOutput]:
    """What steps gave one choice; the last of them ends it."""
    last = len(steps) - 1
    return [
        StepOutput(
            request_id="r",
            token_ids=tuple(ids),
            logprobs=tuple(-float(i) for i in ids),
            finish_reason=reason if number == last else None,
            index=index,
            num_cached_tokens=3 if number == 0 else 0,
        )
        for number, ids in enumerate(steps)
    ]


# Tokens of "é" are halves of it, so a piece may begin inside a character.
STEPS = st.lists(st.lists(st.integers(0, 255), max_size=3), min_size=1, max_size=2 * PIECE)
CHOICES = st.lists(st.tuples(STEPS, st.sampled_from(REASONS)), min_size=1, max_size=3)


@given(choices=CHOICES, stops=st.lists(st.text("abc", min_size=1, max_size=3), max_size=2))
def test_an_answer_in_pieces_is_that_of_single_outputs(
    byte_level: Tokenizer, choices: list[tuple[list[list[int]], FinishReason]], stops: list[str]
) -> None:
    request = _request(GenerationConfig(n=len(choices), temperature=1.0, stop=tuple(stops)))
    single = AnswerStream(request, byte_level, None)
    answer = WholeAnswer(request, byte_level, None)
    queues = [_outputs(i, *choice) for i, choice in enumerate(choices)]
    texts, ids, ended = [""] * len(choices), [[] for _ in choices], dict[int, str]()
    for number in range(max(map(len, queues))):
        for index, queue in enumerate(queues):
            if number >= len(queue) or index in ended:
                continue
            found = answer.add(queue[number])
            for delta in single.merge([queue[number]]):
                texts[index] += delta.text
                ids[index] += delta.token_ids
                if delta.finish_reason is not None:
                    ended[index] = delta.finish_reason
            assert (found is not None) == (index in ended)
    whole = answer.whole()
    assert isinstance(whole, RequestOutput)
    assert [choice.text for choice in whole.choices] == texts
    assert [list(choice.token_ids) for choice in whole.choices] == ids
    assert [choice.finish_reason for choice in whole.choices] == [
        ended[i] for i in range(len(choices))
    ]
    assert all(c.logprobs == tuple(-float(i) for i in c.token_ids) for c in whole.choices)
    assert whole.num_cached_tokens == 3


def test_outputs_are_not_kept(byte_level: Tokenizer) -> None:
    """Hundreds of thousands of tuples that live on would set off collections of all garbage."""
    answer = WholeAnswer(_request(GenerationConfig()), byte_level, None)
    for output in _outputs(0, [[65]] * (2 * PIECE + 5), "length")[:-1]:
        answer.add(output)
    del output
    kept = [x for x in gc.get_objects() if type(x) is StepOutput and x.token_ids == (65,)]
    assert not kept
