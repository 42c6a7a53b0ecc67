"""Other weights for a running server: read beside those in use, then changed while nobody calls.

Knows neither checkpoints nor processes: the engine's side is the `WeightChange` that a server is
given. One change at a time. Offered by AdminService.ReloadModel.
"""

from collections.abc import Awaitable, Callable

from swiftjax.errors import DeadlineError, NotReadyError, UnsupportedError
from swiftjax.serving.gate import Gate
from swiftjax.serving.served import Served

CLOSED = "the weights are being changed; try again in a moment"
DRAINING = "the server takes no new calls, so there is nothing to change the weights for"


class Reloading:
    """Changes the weights of one server."""

    def __init__(
        self,
        gate: Gate,
        drain: Callable[[str, float], Awaitable[bool]],
        open: Callable[[Served], Awaitable[object]],
    ) -> None:
        """`drain` refuses calls until `open`; it says whether all that ran ended in time."""
        self._gate = gate
        self._drain = drain
        self._open = open
        self._is_busy = False

    async def run(self, served: Served, path: str, seconds: float) -> Served:
        """Serve the checkpoint at `path` (empty: read the same again); gives what is served then.

        Raises what is wrong with the checkpoint, DeadlineError when calls ran for longer than
        `seconds`, NotReadyError while another change or a drain is under way; then nothing changes.
        """
        if served.weights is None:
            raise UnsupportedError("the weights of this server cannot be changed: start another")
        if self._is_busy:
            raise NotReadyError("the weights are being changed already; try again later")
        if not self._gate.is_open:
            raise NotReadyError(DRAINING)
        self._is_busy = True
        try:
            await served.weights.read(path)
            if not await self._drain(CLOSED, seconds):
                served.weights.forget()
                await self._open_if_alive(served)
                raise DeadlineError(
                    f"calls still ran after {seconds:g} s; nothing was changed: give them longer"
                )
            changed = served._replace(model=await served.weights.use())
            await self._open_if_alive(changed)
        finally:
            self._is_busy = False
        return changed

    async def _open_if_alive(self, served: Served) -> None:
        """Let calls in again; where the engine has died, whoever starts another one does that."""
        if served.engine.is_alive:
            await self._open(served)
