"""The front end: gRPC service, client, error mapping. Handed an AsyncEngine; never imports jax."""
