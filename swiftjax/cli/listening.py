"""Where a server listens, whom it lets in, what it tells: options of `serve`, read and checked.

API keys come from options, a file and the environment; only here are they read.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from swiftjax.errors import InvalidRequestError

if TYPE_CHECKING:
    from swiftjax.serving.keys import KeyRing
    from swiftjax.serving.listeners import Listen
    from swiftjax.serving.quota import Quota
    from swiftjax.serving.tls import ServerTls

KEYS_VARIABLE = "SWIFTJAX_API_KEYS"  # with commas between

Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[
    int, typer.Option(min=0, max=65535, help="Port of the HTTP server; 0 takes a free one.")
]
GrpcPort = Annotated[
    int, typer.Option(min=0, max=65535, help="Port of the gRPC server; 0 takes a free one.")
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Let other machines in without API keys.", show_default="off"),
]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        help="A key that callers must send; may be repeated. Other users of this machine can see "
        f"it: prefer --api-key-file or {KEYS_VARIABLE}.",
        show_default="no keys",
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        help="A file with a line KEY or KEY admin per key; read again on SIGHUP.",
        show_default="none",
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(
        help="Certificate chain (PEM) of both ports; read again on SIGHUP.", show_default="none"
    ),
]
TlsKey = Annotated[Path | None, typer.Option(help="Its private key (PEM).", show_default="none")]
TlsClientCa = Annotated[
    Path | None,
    typer.Option(
        help="CA (PEM) of the certificates that clients must then have (mTLS).", show_default="none"
    ),
]
AllowedOrigins = Annotated[
    str,
    typer.Option(
        help="Origins of web pages that may call, with commas between.", show_default="none"
    ),
]

MaxRequestsPerKey = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Most answers that one API key may have running or waiting.",
        show_default="--max-num-seqs plus half of --max-queue-len where there are several keys, "
        "else no limit",
    ),
]
ToolCallParser = Annotated[
    Literal["hermes", "llama3_json"] | None,
    typer.Option(
        help="How the model writes calls of tools.", show_default="what its chat template shows"
    ),
]
OtlpEndpoint = Annotated[
    str | None,
    typer.Option(
        help="Send OpenTelemetry spans of requests, without any text, to the collector at this "
        "address, e.g. http://127.0.0.1:4317 (needs the extra otel).",
        show_default="none",
    ),
]


def read_listen(
    *,
    host: str,
    port: int,
    grpc_port: int,
    api_keys: Sequence[str],
    api_key_file: Path | None,
    insecure: bool,
    allowed_origins: str,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
) -> "Listen":
    """Read all of it; raises InvalidRequestError, also for letting strangers in by mistake."""
    # Before grpc is imported: a taken port is told in our words, not in those of its C core too.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from swiftjax.serving.listeners import Listen

    keys = _read_keys(api_keys, api_key_file)
    tls = _read_tls(tls_cert, tls_key, tls_client_ca)
    knows_callers = not keys.is_open or tls_client_ca is not None
    _check_host(host, insecure or knows_callers)
    return Listen(
        host=host,
        grpc_port=grpc_port,
        http_port=port,
        keys=keys,
        allowed_origins=_read_origins(allowed_origins),
        tls=tls,
    )


def make_quota(
    limit: int | None, max_queue_len: int, keys: "KeyRing", max_num_seqs: int
) -> "Quota | None":
    """Limit what one key may have, by default to all that run and half of what may wait."""
    if keys.is_open:  # and stays so
        return None
    from swiftjax.serving.quota import Quota

    if limit is not None:
        return Quota(limit)
    return Quota(max_num_seqs + max_queue_len // 2, lambda: keys.has_several)


def choose_policy(policy: str | None, keys: "KeyRing") -> str:
    """What was asked for; else turns go by key where there are keys."""
    if policy is not None:
        return policy
    return "fcfs" if keys.is_open else "fair"


def _read_keys(values: Sequence[str], path: Path | None) -> "KeyRing":
    """Unite the keys of all sources; the file is read again whenever the ring is reloaded."""
    from swiftjax.serving.keys import KeyEntry, KeyRing, parse_keys

    fixed = [*values, *os.environ.get(KEYS_VARIABLE, "").split(",")]

    def load() -> list[KeyEntry]:
        entries = [KeyEntry(key) for value in fixed if (key := value.strip())]
        if path is None:
            return entries
        try:
            found = parse_keys(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"cannot read the API keys of {path}: {error}") from error
        if not found:
            raise InvalidRequestError(f"{path} has no API key: write one per line")
        return entries + found

    return KeyRing(load)


def _read_origins(text: str) -> list[str]:
    """Split --allowed-origins; raises InvalidRequestError for what no browser would send."""
    origins = [origin for part in text.split(",") if (origin := part.strip())]
    for origin in origins:
        if not re.fullmatch(r"https?://[A-Za-z0-9.:\[\]-]+", origin):
            raise InvalidRequestError(
                f"--allowed-origins has {origin!r:.80}; an origin is like https://example.org:8080"
            )
    return origins


def _read_tls(cert: Path | None, key: Path | None, client_ca: Path | None) -> "ServerTls | None":
    from swiftjax.serving.tls import ServerTls

    if cert is not None and key is not None:
        return ServerTls(cert, key, client_ca)
    if (cert, key, client_ca) != (None, None, None):
        raise InvalidRequestError("TLS needs both --tls-cert and --tls-key")
    return None


def _check_host(host: str, may_be_public: bool) -> None:
    from swiftjax.serving.addresses import is_loopback

    if not may_be_public and not is_loopback(host):
        raise InvalidRequestError(
            f"--host {host} lets other machines in and there are no API keys: give some with "
            f"--api-key-file or {KEYS_VARIABLE}, add --insecure if only trusted ones can reach "
            "it, or use --host 127.0.0.1"
        )
