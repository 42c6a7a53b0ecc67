"""Keys of full pages: a page is found again by everything that its contents depend on.

The key of page i is a sha256 over the key of page i - 1 and the tokens of page i; the chain starts
from a process secret, the model version and the request's salt. So equal keys mean equal prefixes,
tenants with different salts never meet, and no client can guess a key. Used by `sequence_pages.py`.
"""

import hashlib
import secrets
from array import array
from collections.abc import Sequence as SequenceOf


class PageKeys:
    """Makes the keys of one engine's pages."""

    def __init__(self, page_size: int, model_version: str) -> None:
        self._page_size = page_size
        self._root = hashlib.sha256(secrets.token_bytes(32) + model_version.encode()).digest()

    def extend(self, keys: list[bytes], token_ids: SequenceOf[int], salt: str) -> None:
        """Append the keys of the full pages of `token_ids` that `keys` does not cover yet."""
        size = self._page_size
        for start in range(len(keys) * size, len(token_ids) - size + 1, size):
            parent = keys[-1] if keys else hashlib.sha256(self._root + salt.encode()).digest()
            tokens = array("q", token_ids[start : start + size]).tobytes()
            keys.append(hashlib.sha256(parent + tokens).digest())
