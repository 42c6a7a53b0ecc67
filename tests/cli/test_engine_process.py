"""What `serve` hands to its engine process."""

import asyncio

import msgspec
import pytest

from swiftjax.cli import engine_process
from swiftjax.cli.engine_process import _Job, _read_config, start_engine
from swiftjax.config import EngineConfig, ReaderLimits, SessionLimits
from swiftjax.quantization import Quantization


def test_every_field_of_the_configuration_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(
        model_path="m", dtype="bfloat16", max_model_len=7, policy="fair", swap_space_gib=0.5,
        readers=ReaderLimits(max_unread_tokens=3), sessions=SessionLimits(max_open=5),
        quantization=Quantization(kind="int4", group_size=64), load_format="dummy",
    )  # fmt: skip
    sent: list[bytes] = []

    async def keep(command: object, job: bytes) -> None:
        sent.append(job)

    monkeypatch.setattr(engine_process.ProcessLink, "start", keep)
    asyncio.run(start_engine(config, policy="fair", quiet=True))
    assert _read_config(msgspec.msgpack.decode(sent[0], type=_Job)) == config
