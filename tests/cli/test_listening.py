"""Options of `serve` that say where it listens and whom it lets in."""

import resource
from pathlib import Path
from typing import Any

import pytest
import trustme

from swiftjax.cli.file_limit import MAX_FILES, OWN_FILES, raise_file_limit
from swiftjax.cli.listening import KEYS_VARIABLE, choose_policy, read_listen
from swiftjax.errors import InvalidRequestError, UnauthenticatedError
from swiftjax.serving.keys import KeyEntry, KeyRing

KEY, OTHER_KEY, THIRD_KEY = "key-of-a-user", "key-of-another", "key-of-a-third"


def read(**options: Any) -> Any:
    """Read options; the others are as they are by default."""
    defaults = {
        "host": "127.0.0.1", "port": 0, "grpc_port": 0, "api_keys": [], "api_key_file": None,
        "insecure": False, "allowed_origins": "", "tls_cert": None, "tls_key": None,
        "tls_client_ca": None,
    }  # fmt: skip
    return read_listen(**defaults | options)


def knows(ring: KeyRing, key: str) -> bool:
    """Whether a ring lets a key in."""
    try:
        ring.check(f"Bearer {key}".encode())
    except UnauthenticatedError:
        return False
    return True


def test_keys_of_all_sources_are_united(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{KEY}\n")
    monkeypatch.setenv(KEYS_VARIABLE, f" {OTHER_KEY} , ")
    ring = read(api_keys=[THIRD_KEY], api_key_file=path).keys
    assert all(knows(ring, key) for key in (KEY, OTHER_KEY, THIRD_KEY))
    assert not knows(ring, "key-of-nobody")


def test_strangers_are_let_in_only_on_purpose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    with pytest.raises(InvalidRequestError, match=r"0\.0\.0\.0.*no API keys"):
        read(host="0.0.0.0")
    assert read(host="0.0.0.0", insecure=True).keys.is_open
    assert not read(host="0.0.0.0", api_keys=[KEY]).keys.is_open
    assert read().keys.is_open
    ca = trustme.CA()
    leaf = ca.issue_cert("localhost")
    files = {name: tmp_path / name for name in ("tls_cert", "tls_key", "tls_client_ca")}
    files["tls_cert"].write_bytes(leaf.cert_chain_pems[0].bytes())
    files["tls_key"].write_bytes(leaf.private_key_pem.bytes())
    files["tls_client_ca"].write_bytes(ca.cert_pem.bytes())
    assert read(host="0.0.0.0", **files).tls.needs_client_certificate
    del files["tls_client_ca"]
    with pytest.raises(InvalidRequestError, match="no API keys"):
        read(host="0.0.0.0", **files)
    with pytest.raises(InvalidRequestError, match="both --tls-cert and --tls-key"):
        read(tls_cert=files["tls_cert"])


@pytest.mark.parametrize("text", ["", "short\n", "secret-word another third\n"])
def test_broken_key_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(InvalidRequestError) as caught:
        read(api_key_file=path)
    assert not text or text.split()[0] not in str(caught.value)
    with pytest.raises(InvalidRequestError, match="missing"):
        read(api_key_file=tmp_path / "missing")


def test_turns_go_by_key_where_there_are_keys() -> None:
    keys, none = KeyRing(lambda: [KeyEntry(KEY)]), KeyRing()
    assert (choose_policy(None, keys), choose_policy(None, none)) == ("fair", "fcfs")
    assert (choose_policy("priority", keys), choose_policy("fcfs", keys)) == ("priority", "fcfs")


def test_origins() -> None:
    listen = read(allowed_origins="https://a.example, http://[::1]:3000,")
    assert listen.allowed_origins == ["https://a.example", "http://[::1]:3000"]
    for text in ("*", "a.example", "https://a.example/path"):
        with pytest.raises(InvalidRequestError, match="origin"):
            read(allowed_origins=text)


def test_a_server_may_have_as_many_connections_as_its_system_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = min(256, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
    try:
        for _ in range(2):
            assert raise_file_limit() == (min(hard, MAX_FILES) - OWN_FILES) // 2
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, MAX_FILES), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
