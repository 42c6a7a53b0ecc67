"""OpenAI's HTTP interface over the same AsyncEngine that gRPC serves; never imports jax.

`app.py` is what surrounds every request, `routes.py` the endpoints, `bodies.py` what they take,
`reading.py` and `writing.py` translate to our values and back, `streams.py` sends events.
"""
