"""Measurements of the engine through its public API; run by `swiftjax bench`."""
