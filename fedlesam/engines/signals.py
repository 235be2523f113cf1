"""Ctrl-C and a cluster's SIGTERM as a request to stop, which takes effect at the next local step."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM)
_stops: list[Callable[[int], None]] = []
"""What the first signal calls, of the outermost block and of those inside it."""


class Interrupted(KeyboardInterrupt):
    """A request to stop ended the current round; nothing has changed.

    Args:
        signum: the signal.
    """

    def __init__(self, signum: int = signal.SIGINT) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.signum = signum


class StopFlag:
    """A request to stop, shared with the workers that this process starts."""

    def __init__(self) -> None:
        self._signum = multiprocessing.RawValue("i", 0)

    def request(self, signum: int) -> None:
        """Ask for a stop.

        Args:
            signum: the signal that asks for it.
        """
        self._signum.value = signum

    def clear(self) -> None:
        """Withdraw the request."""
        self._signum.value = 0

    def check(self) -> None:
        """Raise Interrupted if a stop was requested."""
        if self._signum.value:
            raise Interrupted(self._signum.value)


@contextlib.contextmanager
def handle_signals(stop: Callable[[int], None]) -> Iterator[None]:
    """Handle SIGINT and SIGTERM inside the block; the second signal ends the process at once.

    Python runs signal handlers between two of its own instructions, so not while it waits in a library, as for the
    replies of other processes. A thread that reads the signals' pipe receives them all the same. Inside another block
    that thread is there already, and a signal stops both.

    Args:
        stop: called in that thread with the number of the first signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals belong to the main thread
        return
    with _received() if not _stops else contextlib.nullcontext():
        _stops.append(stop)
        try:
            yield
        finally:
            _stops.remove(stop)


@contextlib.contextmanager
def _received() -> Iterator[None]:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before: dict[int, Any] = {signum: signal.signal(signum, lambda *_: None) for signum in STOPS}
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    listener = threading.Thread(target=_listen, args=(reading,), daemon=True)
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for signum, handler in before.items():
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)
        os.write(writing, b"\0")  # closing would not do: forked workers have this end too
        listener.join()
        os.close(writing)
        os.close(reading)


def _listen(reading: int) -> None:
    received = 0
    while signum := os.read(reading, 1)[0]:
        if signum not in STOPS:
            continue
        received += 1
        if received > 1:
            os._exit(128 + signum)
        for stop in list(_stops):
            stop(signum)
