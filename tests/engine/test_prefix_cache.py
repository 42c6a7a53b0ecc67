"""Keys of pages over a million random blocks: equal for equal prefixes of one tenant only."""

import random
from collections.abc import Iterator

from swiftjax.engine.prefix_cache import PageKeys

PAGE, NUM_PAGES, NUM_TEXTS = 4, 20, 25_000


def texts() -> Iterator[list[int]]:
    """Always the same ones, of two tokens, so that many begin alike."""
    rng = random.Random(0)
    for _ in range(NUM_TEXTS):
        yield rng.choices((0, 1), k=PAGE * NUM_PAGES)


def keys_of(made: PageKeys, salt: str) -> list[bytes]:
    """The key of every page of every text."""
    found: list[bytes] = []
    for text in texts():
        keys: list[bytes] = []
        made.extend(keys, text, salt)
        found += keys
    return found


def test_p19_no_block_of_a_million_is_found_across_salts() -> None:
    made = PageKeys(PAGE, "model")
    mine, theirs = keys_of(made, "a"), keys_of(made, "b")
    assert len(mine) + len(theirs) == 1_000_000
    assert set(mine).isdisjoint(theirs)
    # Within a salt there is a hit for every prefix that came before, and for nothing else.
    prefixes = {tuple(text[: PAGE * (i + 1)]) for text in texts() for i in range(NUM_PAGES)}
    assert len(set(mine)) == len(prefixes) < 450_000


def test_p19_no_client_can_work_out_a_key() -> None:
    keys: list[list[bytes]] = [[], []]
    for found in keys:
        PageKeys(PAGE, "model").extend(found, [1, 2, 3, 4], "")
    assert keys[0] != keys[1]  # each process has a secret
