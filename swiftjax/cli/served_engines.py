"""The engines of one `serve` command: the first, those in place of dead ones, and their weights."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from swiftjax.cli.engine_process import start_engine
from swiftjax.config import EngineConfig
from swiftjax.engine.async_engine import AsyncEngine
from swiftjax.engine.link_messages import EngineInfo
from swiftjax.engine.process_link import ProcessLink
from swiftjax.engine.tokenizer import Tokenizer
from swiftjax.serving.engine_watch import EngineWatch
from swiftjax.serving.messages import describe_model
from swiftjax.serving.proto import swiftjax_pb2 as pb
from swiftjax.serving.quota import Quota
from swiftjax.serving.served import Served
from swiftjax.serving.session_files import GIB, SessionFiles


class ServedEngines:
    """Starts engine processes, one at a time; what measures them outlives them."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        policy: str,
        quiet: bool,
        quota_for: Callable[[int], Quota | None],
        beside: Mapping[str, Any],
    ) -> None:
        """`policy` is written as on the command line; `beside` are further fields of Served.

        `quota_for` is asked with the most requests that run at a time, which the engine may choose.
        """
        # The last part only: where the model lies on this machine is nobody's business.
        self.name = Path(config.model_path).name
        self.config = config  # of the next start
        self.num_loads = 1  # of weights that were changed on purpose
        self._policy = policy
        self._quota_for = quota_for
        self._beside = dict(beside)
        self._quiet = quiet
        self._watch = EngineWatch()
        limits = config.sessions
        self._files: SessionFiles | None = None
        if limits.folder is not None:
            max_bytes = limits.saved_gib * GIB
            self._files = SessionFiles(Path(limits.folder), max_bytes, limits.owner_share)

    async def start(self) -> Served:
        """Start one and stand before it."""
        config = self.config
        link, info = await start_engine(config, policy=self._policy, quiet=self._quiet)
        tokenizer = Tokenizer(info.tokenizer_files)
        engine = AsyncEngine(
            link, tokenizer, info.limits, config.readers, self._watch.take, config.sessions
        )
        weights = _Weights(self, link, info, tokenizer)
        return Served(
            engine=engine,
            model=weights.describe(),
            watch=self._watch,
            session_files=self._files,
            quota=self._quota_for(info.max_num_seqs),
            weights=weights,
            pulse=link,
            **self._beside,
        )


class _Weights:
    """Those of one engine process."""

    def __init__(
        self, engines: ServedEngines, link: ProcessLink, info: EngineInfo, tokenizer: Tokenizer
    ) -> None:
        self._engines = engines
        self._link = link
        self._info = info
        self._tokenizer = tokenizer
        self._path = engines.config.model_path

    async def read(self, path: str) -> None:
        """Read a checkpoint, or the same again."""
        self._path = path or self._engines.config.model_path
        await self._link.read_weights(self._path)

    async def use(self) -> pb.GetModelResponse:
        """Use it, now and in engines that take the place of this one."""
        await self._link.use_weights()
        config = self._engines.config
        self._engines.num_loads += 1
        if self._path != config.model_path:
            self._engines.config = replace(config, model_path=self._path, load_format="auto")
        return self.describe()

    def forget(self) -> None:
        """Keep to what is served."""
        self._link.forget_weights()

    def describe(self) -> pb.GetModelResponse:
        """Say what is served; the name stays, because clients ask for it."""
        version = f"{Path(self._path).name}:{self._engines.num_loads}"
        return describe_model(
            self._engines.name, self._info.model, self._info.limits, self._tokenizer, version
        )
