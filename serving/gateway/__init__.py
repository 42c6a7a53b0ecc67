"""The engine contract of the SMG gateway, `vllm.grpc.engine.VllmEngine`: tokens in, tokens out.

Needs the package smg-grpc-proto (extra `gateway`), which owns the messages; without it a server
just lacks this service.
"""
