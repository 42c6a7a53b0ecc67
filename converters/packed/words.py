"""Codes of 4 or 8 bits out of 32-bit words, lowest bits first, as every quantiser stores them.

Bytes are little-endian, so the codes of a row of words are the nibbles or bytes of its memory.
"""

import numpy as np
from jaxtyping import Int32, UInt8

# AWQ: nibble i of a word belongs to output AWQ_ORDER[i] of its eight.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack_rows(words: Int32[np.ndarray, "R W"], bits: int) -> UInt8[np.ndarray, "R codes"]:
    """Give the 32 / bits codes of every word, in the order of the words in a row."""
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return data
    codes = np.empty((*data.shape, 2), np.uint8)
    np.bitwise_and(data, 15, out=codes[..., 0])
    np.right_shift(data, 4, out=codes[..., 1])
    return codes.reshape(len(data), -1)


def unpack_awq(words: Int32[np.ndarray, "R W"]) -> UInt8[np.ndarray, "R codes"]:
    """Give the 4-bit codes of AWQ's words in the order of the outputs."""
    stored = unpack_rows(words, 4).reshape(len(words), -1, len(AWQ_ORDER))
    codes = np.empty_like(stored)
    codes[:, :, AWQ_ORDER] = stored
    return codes.reshape(len(words), -1)
