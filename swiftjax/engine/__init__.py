"""CONTROL PLANE: host only. Nothing in this folder imports jax."""
