"""Errors to statuses: one table, complete; bugs reach the client as an id and nothing else."""

import asyncio
import logging

import grpc
import pytest

from swiftjax import errors
from swiftjax.serving.proto import swiftjax_pb2 as pb
from swiftjax.serving.status import MAX_STATUS_CHARS, STATUSES, error_from_status, grpc_status
from tests.serving.harness import long_request, make_core, serving, status_of

SECRET = "the text of an internal exception"


def subclasses(error: type[errors.SwiftJaxError]) -> set[type[errors.SwiftJaxError]]:
    """Every class below this one."""
    below = set(error.__subclasses__())
    return below.union(*(subclasses(e) for e in below))


def test_every_error_has_a_status_of_its_own() -> None:
    ours = {e for e in subclasses(errors.SwiftJaxError) if e.__module__ == errors.__name__}
    assert ours and ours == set(STATUSES)
    no_fault_of_the_server = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
    assert not {row.grpc for row in STATUSES.values()} & set(no_fault_of_the_server)


@pytest.mark.parametrize("error", sorted(STATUSES, key=lambda e: e.__name__))
def test_statuses_come_back_as_errors_of_the_same_status(error: type[errors.SwiftJaxError]) -> None:
    status, details = grpc_status(error("why"))
    again = error_from_status(status, details)
    assert grpc_status(again) == (status, "why")


def test_unlisted_error_and_status() -> None:
    assert grpc_status(errors.SwiftJaxError("x"))[0] == grpc.StatusCode.INTERNAL
    assert "UNKNOWN" in str(error_from_status(grpc.StatusCode.UNKNOWN, "x"))
    assert str(error_from_status(grpc.StatusCode.NOT_FOUND, None)) == "NOT_FOUND"


def test_long_texts_fit_the_header() -> None:
    async def main() -> None:
        async with serving(make_core()) as service:
            request = pb.GenerateRequest(text="a", model="\U0001f9e0" * 10**6)
            code, details = await status_of(service.stub.Generate(request))
            assert code == grpc.StatusCode.NOT_FOUND and len(details) <= MAX_STATUS_CHARS

    asyncio.run(main())


@pytest.mark.parametrize("method", ["Generate", "Tokenize", "GetModel"])
def test_bug_is_internal_with_an_id_and_its_text_stays_in_the_log(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError(SECRET)

    async def main() -> None:
        async with serving(make_core()) as service:
            monkeypatch.setattr(service.engine, "stream", fail)
            monkeypatch.setattr(service.engine.tokenizer, "encode", fail)
            if method == "GetModel":
                monkeypatch.setattr(service.server._service, "served", None)
            call = {
                "Generate": lambda: service.stub.Generate(long_request()),
                "Tokenize": lambda: service.stub.Tokenize(pb.TokenizeRequest(text="a")),
                "GetModel": lambda: service.stub.GetModel(pb.GetModelRequest()),
            }[method]
            code, details = await status_of(call())
            assert code == grpc.StatusCode.INTERNAL
            assert SECRET not in details and "KeyError" not in details
            error_id = details.removeprefix("internal error ").partition(";")[0]
            assert len(error_id) == 16
            assert any(error_id in record.getMessage() for record in caplog.records)
            assert method == "GetModel" or SECRET in caplog.text

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())


def test_bytes_that_are_no_message_are_invalid() -> None:
    async def main() -> None:
        async with serving(make_core()) as service:
            for method in ("Tokenize", "GetModel", "Detokenize"):
                call = service.channel.unary_unary(f"/swiftjax.v1.GenerationService/{method}")
                code, _ = await status_of(call(b"\xff" * 20))
                assert code == grpc.StatusCode.INVALID_ARGUMENT
            stream = service.channel.unary_stream("/swiftjax.v1.GenerationService/Generate")
            code, _ = await status_of(stream(b"\x0a\x02\xff\xfe"))
            assert code == grpc.StatusCode.INVALID_ARGUMENT
            missing = service.channel.unary_unary("/swiftjax.v1.GenerationService/Nothing")
            code, _ = await status_of(missing(b""))
            assert code == grpc.StatusCode.UNIMPLEMENTED

    asyncio.run(main())
