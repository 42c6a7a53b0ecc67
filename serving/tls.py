"""Certificates for both transports, read again on SIGHUP without ending a connection.

New connections get the new certificate; those that are open keep what they were opened with.
"""

import ssl
from pathlib import Path

import grpc

from swiftjax.errors import InvalidRequestError


class ServerTls:
    """One certificate with its key and, for mTLS, whose clients may connect."""

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None = None) -> None:
        """Read PEM files; raises InvalidRequestError when they cannot be used."""
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        self.context = self._new_context()
        self._configuration = self._new_configuration()

    @property
    def needs_client_certificate(self) -> bool:
        """Whether only holders of a certificate of the client CA may connect."""
        return self._client_ca is not None

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Give what a gRPC port is opened with."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration,
            lambda: self._configuration,  # asked at every handshake
            require_client_authentication=self.needs_client_certificate,
        )

    def reload(self) -> None:
        """Read certificate and key again; raises InvalidRequestError, and then the old ones hold.

        The client CA stays: a context can learn to trust but not to stop trusting.
        """
        self._new_context()
        configuration = self._new_configuration()
        self.context.load_cert_chain(self._certificate, self._key)
        self._configuration = configuration

    def _new_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self._certificate, self._key)
            if self._client_ca is not None:
                context.load_verify_locations(self._client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            files = ", ".join(str(path) for path in self._paths())
            raise InvalidRequestError(f"cannot use {files} for TLS: {error}") from error
        return context

    def _new_configuration(self) -> grpc.ServerCertificateConfiguration:
        certificate, key, *client_ca = [path.read_bytes() for path in self._paths()]
        return grpc.ssl_server_certificate_configuration(
            [(key, certificate)], client_ca[0] if client_ca else None
        )

    def _paths(self) -> list[Path]:
        paths = (self._certificate, self._key, self._client_ca)
        return [path for path in paths if path is not None]
