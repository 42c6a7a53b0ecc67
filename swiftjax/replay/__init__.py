"""The scheduler as a sandbox: traces run again under other policies, without a model or jax."""
