"""How long the requests of W3 and W4 are; plain numbers, without jax."""

import random
from typing import NamedTuple


class Throughput(NamedTuple):
    """W3: requests of uniform lengths, all submitted at once."""

    num_requests: int = 512
    prompt_lens: tuple[int, int] = (64, 512)
    output_lens: tuple[int, int] = (64, 256)
    seed: int = 7


def throughput_lengths(case: Throughput) -> tuple[list[int], list[int]]:
    """Prompt and output lengths: all prompt lengths are drawn first, then all output lengths."""
    draw = random.Random(case.seed)
    prompt_lens = [draw.randint(*case.prompt_lens) for _ in range(case.num_requests)]
    return prompt_lens, [draw.randint(*case.output_lens) for _ in range(case.num_requests)]
