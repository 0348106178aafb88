"""Ctrl-C while a run takes steps: once ends the run after the step, with a checkpoint; twice ends it now."""

import signal
import threading
from collections.abc import Callable
from types import FrameType


class StoppedError(KeyboardInterrupt):
    """A run has ended early, as Ctrl-C asked for. `step` steps are done; the last one has a checkpoint."""

    def __init__(self, step: int):
        super().__init__(f"stopped after {step} steps")
        self.step = step


class FirstInterrupt:
    """Inside this context the first Ctrl-C sets `seen`, and the second one raises KeyboardInterrupt.

    A caller that handles Ctrl-C itself keeps its handler. Python calls handlers in the main thread only; in
    any other thread this does nothing.
    """

    def __init__(self, on_first: Callable[[], None], wanted: bool = True):
        """on_first: is called at the first one. It must not print: the signal may have come amid a print.

        wanted: False leaves Ctrl-C as it is.
        """
        self.seen = False
        self._on_first, self._wanted, self._installed = on_first, wanted, False

    def __enter__(self) -> "FirstInterrupt":
        is_main = threading.current_thread() is threading.main_thread()
        if self._wanted and is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)
            self._installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.seen:
            raise KeyboardInterrupt
        self.seen = True
        self._on_first()
