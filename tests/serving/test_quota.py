"""How many answers one API key may have by default, which depends on what the engine chose."""

import asyncio
from functools import partial

import pytest

from swiftjax.cli import served_engines
from swiftjax.cli.listening import make_quota
from swiftjax.cli.served_engines import ServedEngines
from swiftjax.config import EngineConfig
from swiftjax.errors import InvalidRequestError
from swiftjax.serving.caller import set_caller
from swiftjax.serving.keys import KeyEntry
from tests.serving.fake_command import start_engine
from tests.serving.harness import make_core
from tests.serving.http.harness import ADMIN_KEY, KEY, make_keys

KEYS = make_keys(KeyEntry(KEY), KeyEntry(ADMIN_KEY))


@pytest.mark.parametrize(
    ("asked", "max_queue_len", "limit"), [(None, 32, 256 + 16), (None, 1, 256), (7, 32, 7)]
)
def test_one_of_several_keys_may_have_all_rows_and_half_of_the_queue(
    asked: int | None, max_queue_len: int, limit: int
) -> None:
    quota = make_quota(asked, max_queue_len, KEYS, 256)
    assert quota is not None

    async def ask(num_answers: int) -> None:
        set_caller(KEYS.check(f"Bearer {KEY}".encode()))
        quota.check_size(num_answers)

    asyncio.run(ask(limit))
    with pytest.raises(InvalidRequestError, match=f"{limit + 1} answers.*may have {limit} at"):
        asyncio.run(ask(limit + 1))


def test_the_rows_are_those_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_engines, "start_engine", start_engine)
    engines = ServedEngines(
        EngineConfig(model_path="bytes"),
        policy="fair",
        quiet=True,
        quota_for=partial(make_quota, None, 32, KEYS),
        beside={},
    )

    async def main() -> None:
        served = await engines.start()
        try:
            set_caller(KEYS.check(f"Bearer {KEY}".encode()))
            rows = make_core().scheduler.config.max_num_seqs
            served.check_size(rows + 16)
            with pytest.raises(InvalidRequestError, match="ask for fewer"):
                served.check_size(rows + 17)
        finally:
            await served.engine.close()

    asyncio.run(main())
