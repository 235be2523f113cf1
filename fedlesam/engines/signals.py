"""Ctrl-C and a cluster's SIGTERM as a wish to stop, met at the next safe point."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """The round under way was dropped because somebody asked to stop; nothing has changed."""

    def __init__(self, signum: int = signal.SIGINT) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.signum = signum


class StopFlag:
    """A wish to stop that a process shares with the workers it starts."""

    def __init__(self) -> None:
        self._signum = multiprocessing.RawValue("i", 0)

    def request(self, signum: int) -> None:
        self._signum.value = signum

    def clear(self) -> None:
        self._signum.value = 0

    def check(self) -> None:
        """At a safe point."""
        if self._signum.value:
            raise Interrupted(self._signum.value)


@contextlib.contextmanager
def handle_signals(halt: Callable[[int], None]) -> Iterator[None]:
    """Call `halt` with the first signal to stop; the second one ends the process at once.

    Python runs signal handlers between two of its own instructions, so never while it waits in a library, as for the
    answers of other processes. A thread that reads the signals' pipe hears them all the same.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals belong to the main thread; who runs this in another one stops it by other means
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before: dict[int, Any] = {signum: signal.signal(signum, lambda *_: None) for signum in STOPS}
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    listener = threading.Thread(target=_listen, args=(reading, halt), daemon=True)
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


def _listen(reading: int, halt: Callable[[int], None]) -> None:
    heard = 0
    while signum := os.read(reading, 1)[0]:
        if signum not in STOPS:
            continue
        heard += 1
        if heard > 1:
            os._exit(128 + signum)
        halt(signum)
