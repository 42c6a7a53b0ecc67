"""Sessions over gRPC and HTTP: turns, forks, files, and whose they are."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest

from swiftjax.errors import KeyLimitError, QueueFullError
from swiftjax.serving.keys import KeyEntry
from swiftjax.serving.proto import swiftjax_pb2 as pb
from swiftjax.serving.proto import swiftjax_pb2_grpc as pb_grpc
from swiftjax.serving.session_files import MIN_BYTES, SessionFiles
from tests.serving import harness
from tests.serving.harness import Service, join, make_core, status_of, until
from tests.serving.http import harness as http
from tests.serving.http.harness import HttpService, make_keys

STREAMING = {"sink": 2, "window": 20}
FIVE = pb.StopOptions(max_new_tokens=5)


def run(body: Callable[[Service, pb_grpc.SessionServiceStub], Awaitable[None]], path: Path) -> None:
    async def main() -> None:
        core = make_core(streams=True)
        async with harness.serving(core, session_folder=path) as service:
            await body(service, pb_grpc.SessionServiceStub(service.channel))
            for session in list(service.engine.sessions._open.values()):
                session.close()
            await until(service.is_idle)

    asyncio.run(main())


async def turn(service: Service, session: str, **fields: object) -> tuple[str, pb.Usage]:
    """The text of a turn and what it took."""
    request = pb.GenerateRequest(session=session, stop=FIVE, **fields)  # type: ignore[arg-type]
    text, last = await join(service.stub.Generate(request))
    return text, last.usage


def test_turns_over_grpc(tmp_path: Path) -> None:
    async def body(service: Service, stub: pb_grpc.SessionServiceStub) -> None:
        asked = pb.OpenSessionRequest(streaming=pb.StreamingOptions(**STREAMING), seed=3)
        session = (await stub.OpenSession(asked)).session
        append = pb.AppendSessionRequest(session=session, text="a" * 300)
        assert (await stub.AppendSession(append)).num_tokens == 300
        assert (await turn(service, session))[0] == "bcdef"
        fork = (await stub.ForkSession(pb.ForkSessionRequest(session=session))).session
        text, usage = await turn(service, session, text="A")
        assert text == "BCDEF" and (usage.prompt_tokens, usage.cached_tokens) == (306, 304)
        await stub.SaveSession(pb.SaveSessionRequest(session=session, name="talk"))
        await stub.CloseSession(pb.CloseSessionRequest(session=session))
        text, usage = await turn(service, fork, token_ids=pb.TokenIds(ids=[48]))
        assert text == "12345" and usage.cached_tokens == 304
        restored = await stub.RestoreSession(pb.RestoreSessionRequest(name="talk"))
        assert restored.num_tokens == 311
        text, usage = await turn(service, restored.session)
        assert text == "GHIJK" and usage.cached_tokens == 310

    run(body, tmp_path)


def test_what_cannot_be_over_grpc_has_a_status(tmp_path: Path) -> None:
    async def body(service: Service, stub: pb_grpc.SessionServiceStub) -> None:
        invalid = grpc.StatusCode.INVALID_ARGUMENT
        code, details = await status_of(stub.CloseSession(pb.CloseSessionRequest(session="x")))
        assert code == grpc.StatusCode.NOT_FOUND and "'x'" in details
        session = (await stub.OpenSession(pb.OpenSessionRequest())).session
        code, details = await status_of(
            stub.AppendSession(pb.AppendSessionRequest(session=session))
        )
        assert code == invalid and "set text" in details
        request = pb.GenerateRequest(session=session)
        code, details = await status_of(service.stub.Generate(request))
        assert code == invalid and "append something first" in details
        several = pb.GenerateRequest(session=session, text="a", sampling=pb.SamplingOptions(n=2))
        code, details = await status_of(service.stub.Generate(several))
        assert code == invalid and "does not go with n" in details
        # What was refused has left nothing behind.
        assert (await turn(service, session, text="k"))[1].prompt_tokens == 1
        for name in ("", "../talk", ".talk", "a/b", "x" * 200):
            save = pb.SaveSessionRequest(session=session, name=name)
            delete = pb.DeleteSavedSessionRequest(name=name)
            for call in (stub.SaveSession(save), stub.DeleteSavedSession(delete)):
                code, details = await status_of(call)
                assert code == invalid and "named" in details
        code, details = await status_of(stub.RestoreSession(pb.RestoreSessionRequest(name="no")))
        assert code == invalid and "cannot read session 'no'" in details
        assert str(tmp_path) not in details
        assert not list(tmp_path.iterdir())

    run(body, tmp_path)


def test_turns_over_http(tmp_path: Path) -> None:
    async def body(service: HttpService) -> None:
        opened = await service.post("/v1/sessions", {"streaming": STREAMING, "seed": 1})
        session = opened["id"]
        asked = {"session": session, "max_tokens": 5, "temperature": 0}
        answer = await service.post("/v1/completions", asked | {"prompt": "a" * 300})
        assert answer["choices"][0]["text"] == "bcdef"
        fork = (await service.post("/v1/sessions/fork", {"session": session}))["id"]
        chat = asked | {"messages": [{"role": "user", "content": "q"}]}
        answer = await service.post("/v1/chat/completions", chat)
        assert answer["choices"][0]["message"]["content"] == "<=>?@"
        assert answer["usage"]["prompt_tokens"] == 305 + len(";user:q;")
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 304
        append = {"session": fork, "prompt": [48]}
        assert (await service.post("/v1/sessions/append", append))["num_tokens"] == 306
        again = asked | {"session": fork, "prompt": ""}
        answer = await service.post("/v1/completions", again)
        assert answer["choices"][0]["text"] == "12345"
        await service.post("/v1/sessions/save", {"session": fork, "name": "talk"})
        for name in (session, fork):
            assert (await service.post("/v1/sessions/close", {"session": name}))["closed"]
        restored = await service.post("/v1/sessions/restore", {"name": "talk"})
        assert restored["num_tokens"] == 311
        answer = await service.post("/v1/completions", again | {"session": restored["id"]})
        assert answer["choices"][0]["text"] == "6789:"

    run_http(body, tmp_path)


def run_http(
    body: Callable[[HttpService], Awaitable[None]], path: Path | None, *keys: KeyEntry
) -> None:
    async def main() -> None:
        core = make_core(streams=True)
        ring = make_keys(*keys) if keys else None
        async with http.serving(core, session_folder=path, keys=ring) as service:
            await body(service)

    asyncio.run(main())


def test_what_cannot_be_over_http_has_a_status() -> None:
    async def body(service: HttpService) -> None:
        session = (await service.post("/v1/sessions", {}))["id"]
        for path, fields, status, word in (
            ("/v1/sessions/close", {"session": "x"}, 404, "no session"),
            ("/v1/completions", {"session": "x", "prompt": "a"}, 404, "no session"),
            ("/v1/completions", {"session": session, "prompt": ["a", "b"]}, 400, "one prompt"),
            ("/v1/completions", {"session": session, "prompt": "a", "n": 2}, 400, "not go with n"),
            ("/v1/sessions/append", {"session": session}, 400, "exactly one"),
            ("/v1/sessions/save", {"session": session, "name": "a"}, 400, "--session-dir"),
            ("/v1/sessions", {"seed": -1}, 400, "seed"),
        ):
            response = await service.client.post(path, json=fields)
            assert response.status_code == status, response.text
            error = http.error_of(response)
            assert word in error["message"]
            assert (error["code"] == "session_not_found") == (status == 404)

    run_http(body, None)


def test_a_session_belongs_to_the_key_that_opened_it(tmp_path: Path) -> None:
    async def body(service: HttpService) -> None:
        session = (await service.post("/v1/sessions", {}))["id"]
        await service.post("/v1/sessions/append", {"session": session, "prompt": "secret"})
        await service.post("/v1/sessions/save", {"session": session, "name": "talk"})
        other = {"authorization": "Bearer other-key-of-good-length"}
        for path, fields, status in (
            ("/v1/sessions/append", {"session": session, "prompt": "a"}, 404),
            ("/v1/completions", {"session": session, "prompt": ""}, 404),
            ("/v1/sessions/restore", {"name": "talk"}, 400),
        ):
            response = await service.client.post(path, json=fields, headers=other)
            assert response.status_code == status, response.text

    keys = [KeyEntry(http.KEY), KeyEntry("other-key-of-good-length")]
    run_http(body, tmp_path, *keys)


def test_a_turn_is_taken_once(tmp_path: Path) -> None:
    async def body(service: Service, stub: pb_grpc.SessionServiceStub) -> None:
        session = (await stub.OpenSession(pb.OpenSessionRequest())).session
        append = pb.AppendSessionRequest(session=session, text="a", turn_id="first")
        await stub.AppendSession(append)
        code, details = await status_of(stub.AppendSession(append))
        assert code == grpc.StatusCode.ALREADY_EXISTS and "'first'" in details
        # What was refused may be tried again under its name.
        wrong = pb.GenerateRequest(
            session=session, text="b", turn_id="second", sampling=pb.SamplingOptions(n=2)
        )
        assert (await status_of(service.stub.Generate(wrong)))[0] == invalid
        asked = {"session": session, "text": "b", "turn_id": "second"}
        assert (await turn(service, **asked))[1].prompt_tokens == 2
        again = pb.GenerateRequest(**asked)  # type: ignore[arg-type]
        assert (await status_of(service.stub.Generate(again)))[0] == grpc.StatusCode.ALREADY_EXISTS
        assert (await turn(service, **asked | {"turn_id": "third"}))[1].prompt_tokens == 8
        alone = pb.GenerateRequest(text="b", turn_id="x")
        assert "turns of a session" in (await status_of(service.stub.Generate(alone)))[1]

    invalid = grpc.StatusCode.INVALID_ARGUMENT
    run(body, tmp_path)


def test_a_turn_over_http_is_taken_once(tmp_path: Path) -> None:
    async def body(service: HttpService) -> None:
        session = (await service.post("/v1/sessions", {}))["id"]
        asked = {"session": session, "max_tokens": 5, "prompt": "a", "turn_id": "first"}
        await service.post("/v1/completions", asked)
        for path in ("/v1/completions", "/v1/sessions/append"):
            body = {name: asked[name] for name in ("session", "prompt", "turn_id")}
            refused = await service.client.post(path, json=body)
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "turn_repeated"
        alone = await service.client.post("/v1/completions", json={"prompt": "a", "turn_id": "x"})
        assert alone.status_code == 400 and alone.json()["error"]["param"] == "turn_id"

    run_http(body, tmp_path)


def test_saved_sessions_are_deleted_by_who_saved_them(tmp_path: Path) -> None:
    async def body(service: HttpService) -> None:
        session = (await service.post("/v1/sessions", {}))["id"]
        await service.post("/v1/sessions/append", {"session": session, "prompt": "secret"})
        await service.post("/v1/sessions/save", {"session": session, "name": "talk"})
        other = {"authorization": "Bearer other-key-of-good-length"}
        name = {"name": "talk"}
        refused = await service.client.post("/v1/sessions/delete", json=name, headers=other)
        assert refused.status_code == 404 and len(list(tmp_path.iterdir())) == 1
        assert (await service.post("/v1/sessions/delete", name))["deleted"]
        assert not list(tmp_path.iterdir())
        assert (await service.client.post("/v1/sessions/delete", json=name)).status_code == 404
        assert len(service.engine.sessions) == 1

    keys = [KeyEntry(http.KEY), KeyEntry("other-key-of-good-length")]
    run_http(body, tmp_path, *keys)


def test_saved_sessions_are_bounded_in_all_and_for_each_key(tmp_path: Path) -> None:
    files = SessionFiles(tmp_path, max_bytes=4 * MIN_BYTES)
    for name in ("a", "b"):  # small ones count too
        files.check_room(files.path(name, "me"), "me")
        files.path(name, "me").touch()
    files.check_room(files.path("a", "me"), "me")  # to be replaced
    with pytest.raises(KeyLimitError, match="delete some"):
        files.check_room(files.path("c", "me"), "me")
    files.check_room(files.path("c", "they"), "they")
    with files.path("c", "they").open("wb") as file:
        file.truncate(2 * MIN_BYTES)
    with pytest.raises(QueueFullError, match="all saved sessions"):
        files.check_room(files.path("d", "others"), "others")
    files.delete("c", "they")
    files.check_room(files.path("d", "others"), "others")


def test_what_a_killed_server_left_unfinished_is_removed_some_day(tmp_path: Path) -> None:
    old, new = tmp_path / ".all-a.session.x1y2", tmp_path / ".all-b.session.x1y2"
    whole = tmp_path / "all-a.session"
    for path in (old, new, whole):
        path.touch()
    os.utime(old, (0, 0))
    os.utime(whole, (0, 0))
    SessionFiles(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([new, whole])
