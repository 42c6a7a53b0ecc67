"""SwiftJAX: an LLM inference engine in JAX for NVIDIA GPUs.

Public names are resolved on first use, so that `import swiftjax` loads neither jax nor grpc.
"""

import importlib
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swiftjax.api import Engine as Engine
    from swiftjax.async_api import start_async_engine as start_async_engine
    from swiftjax.config import EngineConfig as EngineConfig
    from swiftjax.engine.async_engine import AsyncEngine as AsyncEngine
    from swiftjax.engine.constraint import Constraint as Constraint
    from swiftjax.engine.request import GenerationConfig as GenerationConfig
    from swiftjax.engine.request import RequestOptions as RequestOptions
    from swiftjax.engine.request import RequestOutput as RequestOutput
    from swiftjax.engine.streaming import Streaming as Streaming
    from swiftjax.errors import SwiftJaxError as SwiftJaxError
    from swiftjax.sessions import Session as Session

__version__ = "0.1.0"
IMPORTED_AT = time.time()  # no source of ours was read before

_HOMES = {
    "Engine": "swiftjax.api",
    "start_async_engine": "swiftjax.async_api",
    "AsyncEngine": "swiftjax.engine.async_engine",
    "EngineConfig": "swiftjax.config",
    "Constraint": "swiftjax.engine.constraint",
    "GenerationConfig": "swiftjax.engine.request",
    "RequestOptions": "swiftjax.engine.request",
    "RequestOutput": "swiftjax.engine.request",
    "Session": "swiftjax.sessions",
    "Streaming": "swiftjax.engine.streaming",
    "SwiftJaxError": "swiftjax.errors",
    "CheckpointError": "swiftjax.errors",
    "InvalidRequestError": "swiftjax.errors",
    "UnsupportedError": "swiftjax.errors",
}

__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'swiftjax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
