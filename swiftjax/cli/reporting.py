"""What the user sees when something ends early: one line on stderr and the right exit code.

The only place that maps exceptions to exit codes; commands just raise.
"""

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from swiftjax.errors import (
    CheckpointError,
    InvalidRequestError,
    NotFoundError,
    SwiftJaxError,
    UnsupportedError,
)

BAD_INPUT = (InvalidRequestError, CheckpointError, NotFoundError, UnsupportedError)
EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPT = 130
SECONDS_TO_INTERRUPT_AGAIN = 0.05


class ReportingGroup(TyperGroup):
    """The root group: runs a subcommand and reports what it raises."""

    def invoke(self, ctx: typer.Context) -> Any:
        """Run the subcommand; usage errors, exits and a closed stdout are left to typer."""
        debug = bool(ctx.params.get("debug")) or os.environ.get("SWIFTJAX_DEBUG") == "1"
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
        # Ours only: what jax and orbax say at this level fills screens.
        logging.getLogger("swiftjax").setLevel(logging.DEBUG if debug else logging.WARNING)
        sys.unraisablehook = interrupting_again(sys.unraisablehook)
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print_line("interrupted")
            raise typer.Exit(EXIT_INTERRUPT) from None
        except (typer.Exit, typer.Abort, TyperException, BrokenPipeError):
            raise
        except Exception as error:
            if debug:
                traceback.print_exc()
            print_line(_describe(error))
            code = EXIT_BAD_INPUT if isinstance(error, BAD_INPUT) else EXIT_FAILURE
            raise typer.Exit(code) from None


def interrupting_again(report: Callable[[Any], object]) -> Callable[[Any], None]:
    """A hook for exceptions that nobody can raise: an interrupt among them comes again soon.

    Python drops what is raised in finalisers and in callbacks of its garbage collector. jax has one
    of those, which runs often while a model is loaded. `report` gets all other exceptions.
    """

    def hook(dropped: Any) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            threading.Thread(target=_interrupt_outside, args=(hook.__code__,), daemon=True).start()
        else:
            report(dropped)

    return hook


def _interrupt_outside(hook: CodeType) -> None:
    """Interrupt the main thread once it has left the hook, where the interrupt would be dropped."""
    main = threading.main_thread().ident
    assert main is not None
    time.sleep(SECONDS_TO_INTERRUPT_AGAIN)
    while _is_inside(hook, sys._current_frames().get(main)):  # pyright: ignore[reportPrivateUsage]
        time.sleep(SECONDS_TO_INTERRUPT_AGAIN)
    signal.pthread_kill(main, signal.SIGINT)  # wakes it from a system call, too


def _is_inside(code: CodeType, frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def print_line(text: str) -> None:
    """Write a line for the user to stderr, which is also where progress goes."""
    print(f"swiftjax: {text}", file=sys.stderr, flush=True)


def _describe(error: Exception) -> str:
    if isinstance(error, SwiftJaxError | OSError):
        return f"error: {error}"
    # Not raised on purpose, so the class says more than the text alone.
    return f"error: {type(error).__name__}: {error} (--debug shows where)"
