"""The front end: gRPC service, client, error mapping. Is handed an AsyncEngine; never imports jax."""
