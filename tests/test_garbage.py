"""What a process holds for good is not looked through again and again."""

import gc
import weakref

from swiftjax.garbage import spare_loaded


class _Node:
    """Something that can hold itself."""

    def __init__(self) -> None:
        self.me = self


def test_what_is_loaded_is_spared_but_garbage_goes() -> None:
    gone, kept = _Node(), _Node()
    watched = weakref.ref(gone)
    del gone
    try:
        spare_loaded()
        assert watched() is None
        assert gc.get_freeze_count() > 0
        assert not any(x is kept for x in gc.get_objects())
        later = weakref.ref(_Node())
        gc.collect()
        assert later() is None
    finally:
        gc.unfreeze()
