"""Sessions in files: text, settings and pages, written whole or not at all, read with suspicion.

A file is a magic word, the length of a JSON header, the header, token ids (int64), the pages, and
the sha256 of all that; numbers are little-endian. Whether the pages are for this model is checked
by whoever loads them. Called by the sessions of both engines.
"""

import hashlib
import json
import math
import os
import struct
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from swiftjax.disk import sync
from swiftjax.engine.checks import check_int
from swiftjax.engine.request_options import RequestOptions
from swiftjax.engine.session_pages import SavedPages, SessionPages
from swiftjax.engine.streaming import Streaming
from swiftjax.errors import InvalidRequestError

_MAGIC = b"SwiftJAX session 1\n"
_MAX_HEADER = 2**24
_LENGTH = struct.Struct("<Q")


class SessionState(NamedTuple):
    """What a session is, but for its pages."""

    token_ids: tuple[int, ...]
    seed: int
    streaming: Streaming | None
    options: RequestOptions


class SavedSession(NamedTuple):
    """All that another process needs to go on."""

    state: SessionState
    pages: SavedPages


def save_session(pages: SessionPages, session_id: str, state: SessionState, path: Path) -> None:
    """Write a session with what it keeps; raises InvalidRequestError as `write_session`."""
    write_session(path, SavedSession(state, pages.save(session_id, state.token_ids)))


def load_session(pages: SessionPages, session_id: str, path: Path) -> SessionState:
    """Read a file and keep its pages for a session.

    Raises InvalidRequestError, naming the file, if it was altered or is of another model.
    """
    session = read_session(path)
    keep_session(pages, session_id, session, path)
    return session.state


def keep_session(pages: SessionPages, session_id: str, session: SavedSession, path: Path) -> None:
    """Keep the pages of a file that was read; raises InvalidRequestError as `load_session`."""
    state, saved = session
    try:
        pages.load(session_id, saved, state.token_ids, state.streaming)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{path}: {error}") from error


def write_session(path: Path, session: SavedSession) -> None:
    """Put a file in place by one rename; raises InvalidRequestError where that is not possible.

    Only its owner may read it: it holds what was said.
    """
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise InvalidRequestError(f"cannot write {path}: {error.strerror}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            found = hashlib.sha256()
            for part in _parts(session):
                found.update(part)
                file.write(part)
            file.write(found.digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        raise InvalidRequestError(f"cannot write {path}: {error.strerror}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def read_session(path: Path) -> SavedSession:
    """Read a file whole; raises InvalidRequestError, naming it, unless it is as it was written."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"cannot read {path}: {error.strerror}") from error
    if not data.startswith(_MAGIC):
        raise InvalidRequestError(f"{path} is no session of this version of SwiftJAX")
    body, digest = memoryview(data)[:-32], data[-32:]
    if hashlib.sha256(body).digest() != digest:
        raise InvalidRequestError(f"{path} was altered or cut since it was saved: its hash differs")
    try:
        return _parse(body)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, struct.error) as error:
        raise InvalidRequestError(f"{path} makes no sense: {error!r:.200}") from error


def _parts(session: SavedSession) -> Iterable[bytes | memoryview]:
    state, pages = session.state, session.pages._asdict()
    chunks = pages.pop("chunks")
    header = {
        "num_tokens": len(state.token_ids),
        "seed": state.seed,
        "streaming": None if state.streaming is None else asdict(state.streaming),
        "options": asdict(state.options),
        "pages": pages,
        "chunks": [{"dtype": chunk.dtype.name, "shape": chunk.shape} for chunk in chunks],
    }
    text = json.dumps(header).encode()
    yield _MAGIC + _LENGTH.pack(len(text)) + text
    yield np.asarray(state.token_ids, "<i8").tobytes()
    for chunk in chunks:
        # Not `tobytes`, which would copy it and hold up every other thread meanwhile.
        yield np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data


def _parse(body: memoryview) -> SavedSession:
    start = len(_MAGIC) + _LENGTH.size
    (length,) = _LENGTH.unpack(body[len(_MAGIC) : start])
    if length > _MAX_HEADER:
        raise ValueError(f"a header of {length} bytes")
    header: dict[str, Any] = json.loads(bytes(body[start : start + length]))
    for name in ("page_size", "known", "num_dropped", "num_pages"):
        if type(header["pages"][name]) is not int:
            raise ValueError(f"{name} is {header['pages'][name]!r}")
    check_int("seed", header["seed"], 0, 2**64 - 1)
    offset = start + length

    def take(dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
        nonlocal offset
        count = math.prod(shape)
        values = np.frombuffer(body, dtype, count, offset).reshape(shape)
        offset += values.nbytes
        return values

    token_ids = take(np.dtype("<i8"), (header["num_tokens"],))
    chunks = tuple(take(_dtype(c["dtype"]), tuple(c["shape"])) for c in header["chunks"])
    if offset != len(body):
        raise ValueError(f"{len(body) - offset} bytes too many")
    streaming = header["streaming"]
    state = SessionState(
        token_ids=tuple(token_ids.tolist()),
        seed=header["seed"],
        streaming=None if streaming is None else Streaming(**streaming),
        options=RequestOptions(**header["options"]),
    )
    return SavedSession(state, SavedPages(**header["pages"], chunks=chunks))


def _dtype(name: str) -> np.dtype[Any]:
    known = getattr(ml_dtypes, name, None)
    return np.dtype(name if known is None else known)
