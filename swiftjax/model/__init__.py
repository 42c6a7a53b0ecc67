"""DATA PLANE: jax. Nothing in this folder imports the control plane (`swiftjax.engine`).

The batch, which both planes share, becomes a pytree here, before any part of the model needs it.
"""

from dataclasses import fields

import jax

from swiftjax.batch import Batch, SamplingBatch, TokenEdits

_STATIC = {"shape"}

for _cls in (Batch, SamplingBatch, TokenEdits):
    _names = {field.name for field in fields(_cls)}
    jax.tree_util.register_dataclass(
        _cls, [f.name for f in fields(_cls) if f.name not in _STATIC], sorted(_names & _STATIC)
    )
