"""TLS and mTLS on both ports: who is refused, and new certificates without an ended connection."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import httpx2
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from swiftjax.errors import InvalidRequestError
from swiftjax.serving.http import http_server
from swiftjax.serving.listeners import Listen, Listeners
from swiftjax.serving.tls import ServerTls
from tests.serving.harness import PATIENCE
from tests.stalls import tried_again_after_stalls

HOST = "localhost"


def write(folder: Path, certificate: trustme.LeafCert) -> tuple[Path, Path]:
    """A certificate and its key as files."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    key.write_bytes(certificate.private_key_pem.bytes())
    return cert, key


def context_for(ca: trustme.CA, certificate: trustme.LeafCert | None = None) -> ssl.SSLContext:
    """What a client trusts and shows."""
    context = ssl.create_default_context()
    ca.configure_trust(context)
    if certificate is not None:
        certificate.configure_cert(context)
    return context


async def over_http(port: int, context: ssl.SSLContext) -> int:
    """The status of /health on a connection of its own."""
    async with httpx2.AsyncClient(verify=context, trust_env=False) as client:
        return (await client.get(f"https://{HOST}:{port}/health")).status_code


async def over_grpc(port: int, ca: trustme.CA, certificate: trustme.LeafCert | None = None) -> None:
    """Ask for health; raises when the handshake fails."""
    pair = (None, None)
    if certificate is not None:
        chain = b"".join(blob.bytes() for blob in certificate.cert_chain_pems)
        pair = (certificate.private_key_pem.bytes(), chain)
    credentials = grpc.ssl_channel_credentials(ca.cert_pem.bytes(), *pair)
    options = (("grpc.enable_http_proxy", 0),)
    async with grpc.aio.secure_channel(f"{HOST}:{port}", credentials, options) as channel:
        request = health_pb2.HealthCheckRequest()
        await health_pb2_grpc.HealthStub(channel).Check(request, timeout=PATIENCE)


def run(tls: ServerTls, body: Callable[[Listeners], Awaitable[None]]) -> None:
    """Run a test against listeners without an engine."""

    async def main() -> None:
        listeners = Listeners(Listen(http_port=0, tls=tls))
        await listeners.start()
        try:
            await body(listeners)
        finally:
            await listeners.stop()

    asyncio.run(main())


def ports(listeners: Listeners) -> tuple[int, int]:
    """The ports of HTTP and gRPC."""
    assert listeners.http is not None and listeners.http.address.startswith("https://")
    return listeners.http.port, listeners.grpc.port


def test_p15_server_certificate_is_checked_and_old_protocols_are_refused(tmp_path: Path) -> None:
    ca, other = trustme.CA(), trustme.CA()
    tls = ServerTls(*write(tmp_path, ca.issue_cert(HOST, "127.0.0.1")))
    old = context_for(ca)
    old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with pytest.warns(DeprecationWarning):
        old.maximum_version = ssl.TLSVersion.TLSv1_1

    async def body(listeners: Listeners) -> None:
        http, grpc_port = ports(listeners)
        assert await over_http(http, context_for(ca)) == 200
        await over_grpc(grpc_port, ca)
        for context in (context_for(other), old):
            with pytest.raises(httpx2.ConnectError):
                await over_http(http, context)
        with pytest.raises(grpc.aio.AioRpcError):
            await over_grpc(grpc_port, other)
        with pytest.raises(httpx2.RemoteProtocolError):
            async with httpx2.AsyncClient(trust_env=False) as client:
                await client.get(f"http://{HOST}:{http}/health")

    run(tls, body)


def test_p15_mutual_tls_refuses_clients_without_a_valid_certificate(tmp_path: Path) -> None:
    ca, clients = trustme.CA(), trustme.CA()
    (tmp_path / "ca.pem").write_bytes(clients.cert_pem.bytes())
    tls = ServerTls(*write(tmp_path, ca.issue_cert(HOST)), tmp_path / "ca.pem")
    yesterday = datetime.now(UTC) - timedelta(days=1)
    expired = clients.issue_cert(
        "old@example.org", not_before=yesterday - timedelta(days=9), not_after=yesterday
    )

    async def body(listeners: Listeners) -> None:
        http, grpc_port = ports(listeners)
        good = clients.issue_cert("me@example.org")
        assert await over_http(http, context_for(ca, good)) == 200
        await over_grpc(grpc_port, ca, good)
        for bad in (None, ca.issue_cert("stranger@example.org"), expired):
            with pytest.raises((httpx2.TransportError, ssl.SSLError)):
                await over_http(http, context_for(ca, bad))
            with pytest.raises(grpc.aio.AioRpcError):
                await over_grpc(grpc_port, ca, bad)

    run(tls, body)


def test_p15_new_certificate_without_dropping_what_is_open(tmp_path: Path) -> None:
    old, new = trustme.CA(), trustme.CA()
    cert, key = write(tmp_path, old.issue_cert(HOST))
    tls = ServerTls(cert, key)

    async def body(listeners: Listeners) -> None:
        http, grpc_port = ports(listeners)
        async with httpx2.AsyncClient(verify=context_for(old), trust_env=False) as client:
            await client.get(f"https://{HOST}:{http}/health")
            key.write_bytes(b"no key")
            with pytest.raises(InvalidRequestError, match=r"key\.pem"):
                tls.reload()
            assert await over_http(http, context_for(old)) == 200
            write(tmp_path, new.issue_cert(HOST))
            tls.reload()
            assert await over_http(http, context_for(new)) == 200
            await over_grpc(grpc_port, new)
            with pytest.raises(httpx2.ConnectError):
                await over_http(http, context_for(old))
            # The connection that was open still is: a new one would not trust the server.
            assert (await client.get(f"https://{HOST}:{http}/health")).status_code == 200

    run(tls, body)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    cert, key = write(tmp_path, trustme.CA().issue_cert(HOST))
    (tmp_path / "other").mkdir()
    _, other_key = write(tmp_path / "other", trustme.CA().issue_cert(HOST))
    for files in ((cert, other_key), (key, cert), (tmp_path / "missing", key)):
        with pytest.raises(InvalidRequestError, match="TLS"):
            ServerTls(*files)


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"], ids=["nothing", "a beginning"])
@tried_again_after_stalls
def test_a_handshake_that_does_not_end_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(http_server, "HANDSHAKE_SECONDS", 0.3)
    ca = trustme.CA()

    async def body(listeners: Listeners) -> None:
        http, _ = ports(listeners)
        reader, writer = await asyncio.open_connection("127.0.0.1", http)
        writer.write(sent)
        assert await asyncio.wait_for(reader.read(), 3.0) == b""
        assert await over_http(http, context_for(ca)) == 200
        writer.close()

    run(ServerTls(*write(tmp_path, ca.issue_cert(HOST))), body)
