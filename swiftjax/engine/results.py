"""What a step's numbers mean for its sequences: scores of prompts, and outputs for clients.

Reads plans and arrays that came back from the device; decides nothing. Called by the scheduler when
a step was read, and by `batching.py` to ask for the same scores that are taken here.
"""

from swiftjax.batch import NONE, Sampled, Scores
from swiftjax.engine.plan import Plan, Work
from swiftjax.engine.request import FinishReason, PromptLogprobs, StepOutput, TopLogprobs
from swiftjax.engine.sequence import Sequence


def scores_of(work: Work) -> range:
    """Positions of a sequence's share from which the next prompt token is still to be scored."""
    sequence = work.sequence
    if not sequence.wants_prompt_scores:
        return range(0)
    # After a preemption by recompute, early positions pass again with their scores known.
    first = max(work.start, len(sequence.prompt_scores))
    return range(first, min(work.start + work.num_new, sequence.prompt_len - 1))


def take_prompt_scores(plan: Plan, sampled: Sampled) -> None:
    """Keep the scores of prompt tokens with their sequences until the first token is told."""
    if sampled.prompt is None:
        return
    offset = 0
    for work in plan.work:
        sequence, span = work.sequence, scores_of(work)
        num_top = sequence.request.generation.prompt_logprobs or 0
        for row in range(offset + span.start - work.start, offset + span.stop - work.start):
            score = float(sampled.prompt.logprobs[row])
            sequence.prompt_scores.append((score, _top(sampled.prompt, row, num_top)))
        offset += work.num_new


def make_output(
    sequence: Sequence, sampled: Sampled, row: int, reason: FinishReason | None
) -> StepOutput:
    """What a client is told of one sampled row, whose token is already the sequence's last."""
    request = sequence.request
    is_first = sequence.num_output == 1
    prompt = _prompt_logprobs(sequence) if is_first else None
    num_cached = sequence.num_cached or 0
    if request.generation.max_new_tokens == 0:
        return StepOutput(
            request.request_id, (), (), "length", prompt=prompt, num_cached_tokens=num_cached
        )
    num_top = request.generation.logprobs
    top = () if num_top is None or sampled.top is None else (_top(sampled.top, row, num_top),)
    return StepOutput(
        request.request_id,
        (sampled.token_ids[row],),
        (sampled.logprobs[row],),
        reason,
        top_logprobs=top,
        prompt=prompt,
        num_cached_tokens=num_cached,
    )


def _prompt_logprobs(sequence: Sequence) -> PromptLogprobs | None:
    if sequence.request.generation.prompt_logprobs is None:
        return None
    scores = sequence.prompt_scores
    return PromptLogprobs((None, *(s for s, _ in scores)), ((), *(top for _, top in scores)))


def _top(scores: Scores, row: int, count: int) -> TopLogprobs:
    ids, logprobs = scores.top_ids[row, :count], scores.top_logprobs[row, :count]
    pairs = zip(ids.tolist(), logprobs.tolist(), strict=True)
    return tuple((token_id, logprob) for token_id, logprob in pairs if token_id != NONE)
