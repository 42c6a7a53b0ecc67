"""Who may call: every path and method needs a key but health; pages need an allowed origin."""

import hmac
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2
from starlette.routing import Route

from swiftjax.errors import ForbiddenError, InvalidRequestError, UnauthenticatedError
from swiftjax.serving.caller import Caller
from swiftjax.serving.gate import Gate
from swiftjax.serving.http.app import OPEN_PATHS
from swiftjax.serving.http.routes import Routes
from swiftjax.serving.keys import KeyEntry, KeyRing, parse_keys
from swiftjax.serving.metrics import Metrics
from swiftjax.serving.proto import swiftjax_pb2 as pb
from tests.serving.harness import status_of
from tests.serving.http.harness import ADMIN_KEY, KEY, HttpService, error_of, make_keys, run

ORIGIN = "https://pages.example"
WITHOUT_KEY = {"authorization": ""}
USER, ADMIN = KeyEntry(KEY), KeyEntry(ADMIN_KEY, True)
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


def all_routes() -> list[tuple[str, str]]:
    """Every method and path that is routed."""
    routes = [
        route for route in Routes(Gate(), Metrics()).router().routes if isinstance(route, Route)
    ]
    return [(method, r.path_format) for r in routes for method in sorted(r.methods or ())]


def test_p10_b053_every_path_needs_a_key_but_health() -> None:
    tricks = [
        ("POST", "//v1/chat/completions"), ("POST", "/V1/chat/completions"),
        ("POST", "/v1/chat/completions/"), ("POST", "/v1/%2e%2e/v1/chat/completions"),
        ("GET", "/health/../metrics"), ("GET", "/health/"), ("GET", "/nothing"), ("OPTIONS", "/x"),
        ("GET", "/docs"), ("DELETE", "/v1/models"), ("GET", "/health%2f..%2fversion"),
    ]  # fmt: skip
    walk = [*all_routes(), *tricks]
    assert len(walk) > 20

    async def body(service: HttpService) -> None:
        for method, path in walk:
            path = path.replace("{model}", "bytes")
            for value in ("", "Bearer", "Bearer wrong-key", KEY, f"Basic {KEY}", f"Bearer {KEY}x"):
                headers = {"authorization": value}
                response = await service.client.request(method, path, headers=headers)
                if path in OPEN_PATHS:
                    assert response.status_code in (200, 405)
                    continue
                assert response.status_code == 401, (method, path, value)
                if method != "HEAD":
                    assert error_of(response)["code"] == "invalid_api_key"
        assert service.num_steps == 0
        await service.post("/v1/chat/completions", CHAT)
        for key in (KEY, ADMIN_KEY):
            headers = {"authorization": f"bearer {key}"}
            assert (await service.client.get("/version", headers=headers)).status_code == 200

    run(body, keys=make_keys(USER, ADMIN))


def test_p10_b053_every_grpc_method_needs_a_key_but_health() -> None:
    files = (pb.DESCRIPTOR, vllm_engine_pb2.DESCRIPTOR)
    services = [service for file in files for service in file.services_by_name.values()]
    methods = [f"/{s.full_name}/{m.name}" for s in services for m in s.methods]
    assert len(methods) >= 20

    async def body(service: HttpService) -> None:
        async with grpc.aio.insecure_channel(service.listeners.grpc.address) as channel:
            for metadata in ((), (("authorization", "Bearer wrong-key"),), (("x-api-key", KEY),)):
                for method in [*methods, "/swiftjax.v1.GenerationService/Nothing"]:
                    code, _ = await status_of(channel.unary_unary(method)(b"", metadata=metadata))
                    assert code == grpc.StatusCode.UNAUTHENTICATED, method
                    code, _ = await status_of(channel.unary_stream(method)(b"", metadata=metadata))
                    assert code == grpc.StatusCode.UNAUTHENTICATED, method
                stub = reflection_pb2_grpc.ServerReflectionStub(channel)
                request = reflection_pb2.ServerReflectionRequest(list_services="")
                call = stub.ServerReflectionInfo(iter([request]), metadata=metadata)
                assert (await status_of(call))[0] == grpc.StatusCode.UNAUTHENTICATED
            health = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            get = channel.unary_unary("/swiftjax.v1.GenerationService/GetModel")
            model = await get(b"", metadata=(("authorization", f"Bearer {KEY}"),))
            assert pb.GetModelResponse.FromString(model).name == "bytes"
            load = channel.unary_unary("/swiftjax.v1.AdminService/GetLoad")
            for key, expected in (
                (KEY, grpc.StatusCode.PERMISSION_DENIED),
                (ADMIN_KEY, grpc.StatusCode.OK),
            ):
                call = load(b"", metadata=(("authorization", f"Bearer {key}"),))
                assert (await status_of(call))[0] == expected

    run(body, keys=make_keys(USER, ADMIN))


def test_b053_cross_origin_requests() -> None:
    preflight = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    allow = "access-control-allow-origin"

    async def body(service: HttpService) -> None:
        client, path = service.client, "/v1/chat/completions"
        asked = await client.options(path, headers=preflight | {"origin": ORIGIN} | WITHOUT_KEY)
        assert asked.status_code in (200, 204) and asked.headers[allow] == ORIGIN
        assert "authorization" in asked.headers["access-control-allow-headers"].lower()
        for method, headers, status in (
            ("POST", {"origin": ORIGIN} | WITHOUT_KEY, 401),
            ("GET", {"origin": ORIGIN} | WITHOUT_KEY, 401),
            ("GET", {"origin": ORIGIN}, 405),
        ):
            response = await client.request(method, path, headers=headers)
            assert response.status_code == status and response.headers[allow] == ORIGIN
        other = {"origin": "https://other.example"} | WITHOUT_KEY
        asked = await client.options(path, headers=preflight | other)
        assert asked.status_code >= 400 and allow not in asked.headers
        assert allow not in (await client.get("/health", headers=other)).headers

    run(body, keys=make_keys(USER), allowed_origins=(ORIGIN,))


def test_without_keys_pages_of_other_origins_may_not_call() -> None:
    async def body(service: HttpService) -> None:
        for origin, status in ((ORIGIN, 200), ("http://evil.example:8000", 403), ("null", 403)):
            response = await service.client.get("/version", headers={"origin": origin})
            assert response.status_code == status
        assert (await service.client.get("/version")).status_code == 200

    run(body, allowed_origins=(ORIGIN,))


def test_b053_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All digests are compared, whichever matches, by the function made for that."""
    compared: list[int] = []
    compare = hmac.compare_digest
    monkeypatch.setattr(
        hmac, "compare_digest", lambda a, b: compared.append(len(a) + len(b)) or compare(a, b)
    )
    ring = make_keys(USER, ADMIN)
    assert ring.check(f"Bearer {KEY}".encode()) != ring.check(f"Bearer {ADMIN_KEY}".encode())
    with pytest.raises(UnauthenticatedError):
        ring.check(b"Bearer wrong-key")
    assert compared == [64] * 6
    assert KEY not in repr(vars(ring))


def test_admin_rights() -> None:
    ring = make_keys(USER, ADMIN)
    ring.check(f"Bearer {ADMIN_KEY}".encode(), for_admin=True)
    with pytest.raises(ForbiddenError):
        ring.check(f"Bearer {KEY}".encode(), for_admin=True)


def test_keys_are_read_again_and_bad_ones_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# ours\n{KEY}\n\n{ADMIN_KEY} admin\n")
    ring = KeyRing(lambda: parse_keys(path.read_text()))
    ring.check(f"Bearer {ADMIN_KEY}".encode(), for_admin=True)
    path.write_text("another-key\n")
    ring.check(f"Bearer {KEY}".encode())
    ring.reload()
    ring.check(b"Bearer another-key")
    for text in ("", "short\n", "key-one and-two\n", "ümlauts-are-many\n", "x" * 600):
        path.write_text(text)
        with pytest.raises(InvalidRequestError) as caught:
            ring.reload()
        assert text.strip()[:8] not in str(caught.value) or not text
        ring.check(b"Bearer another-key")
    with pytest.raises(UnauthenticatedError):
        ring.check(f"Bearer {KEY}".encode())


def test_ring_without_keys_lets_everybody_in() -> None:
    ring = KeyRing()
    assert ring.is_open and ring.check(None, for_admin=True) == Caller("", True)
