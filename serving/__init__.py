"""The front end: gRPC, HTTP, client, keys, errors. Handed an AsyncEngine; never imports jax."""
