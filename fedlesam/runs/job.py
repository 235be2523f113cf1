"""A process that trains one run after another, as the sweep that started it says: JSON lines in, JSON lines out.

Importing PyTorch once for many runs is what makes small runs cheap.
"""

import json
import os
import queue
import signal
import sys
import threading
from typing import Any

from fedlesam import config as configs
from fedlesam.build import load_data
from fedlesam.config import RunConfig
from fedlesam.data.dataset import DataSet
from fedlesam.federation import Record
from fedlesam.interrupt import Interrupted


class Voice:
    """What the sweep hears. Standard output is taken from everybody else: a stray print must not be part of it."""

    def __init__(self) -> None:
        self.out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def tell(self, **about: Any) -> None:
        """If nobody listens, the sweep was killed: stop, with what was done in the folder."""
        try:
            self.out.write(json.dumps(about) + "\n")
            self.out.flush()
        except OSError:
            raise Interrupted(signal.SIGTERM) from None


def listen(tasks: "queue.SimpleQueue[dict[str, Any] | None]") -> None:
    """The end of the input is the end of the sweep, however it came; a run under way is asked to stop."""
    for line in sys.stdin:
        tasks.put(json.loads(line))
    tasks.put(None)
    os.kill(os.getpid(), signal.SIGTERM)


def work(tasks: "queue.SimpleQueue[dict[str, Any] | None]", voice: Voice) -> None:
    from pathlib import Path

    from fedlesam.runner import execute

    held: tuple[tuple[object, ...], DataSet] | None = None
    while (task := tasks.get()) is not None:
        hyper = task["config"].pop("hyper")
        config = configs.update(RunConfig(), {**task["config"], **hyper})

        def watch(record: Record) -> None:
            voice.tell(round=record.round + 1, accuracy=record.test_accuracy)

        try:
            needed = (config.data, config.data_dir, config.samples, config.held_out)
            if held is None or held[0] != needed:
                held = (needed, load_data(config))
            execute(config, Path(task["folder"]), watch=watch, data=held[1])
        except KeyboardInterrupt:
            voice.tell(end="interrupted")
            return
        except Exception as error:
            voice.tell(end="failed", why=f"{error}" or type(error).__name__)
        else:
            voice.tell(end="finished")


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    voice = Voice()
    tasks: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    threading.Thread(target=listen, args=(tasks,), daemon=True).start()
    work(tasks, voice)


if __name__ == "__main__":
    main()
