"""A process that trains one run after another for the sweep that started it: JSON lines in, JSON lines out.

Importing PyTorch once for many runs is what makes small runs cheap.
"""

import json
import os
import queue
import signal
import sys
import threading
from typing import Any

from fedlesam.data.dataset import DataSet
from fedlesam.engines.signals import Interrupted
from fedlesam.federation import Record
from fedlesam.runs import config as configs
from fedlesam.runs.build import load_data


class Output:
    """Messages to the sweep. Standard output is redirected, so that a stray print does not become a message."""

    def __init__(self) -> None:
        self.out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def send(self, **message: Any) -> None:
        """If the pipe is closed, the sweep was killed: stop with a checkpoint."""
        try:
            self.out.write(json.dumps(message) + "\n")
            self.out.flush()
        except OSError:
            raise Interrupted(signal.SIGTERM) from None


def read_tasks(tasks: "queue.SimpleQueue[dict[str, Any] | None]") -> None:
    """At the end of the input the sweep has ended; the run under way is stopped.

    Args:
        tasks: Where they go; None is the end.
    """
    for line in sys.stdin:
        tasks.put(json.loads(line))
    tasks.put(None)
    os.kill(os.getpid(), signal.SIGTERM)


def work(tasks: "queue.SimpleQueue[dict[str, Any] | None]", output: Output) -> None:
    """Train the runs of the queue, and say how each goes, until there are no more.

    Args:
        tasks: Where they come from; None is the end.
        output: Where messages go.
    """
    from pathlib import Path

    from fedlesam.runs.runner import execute

    held: tuple[tuple[object, ...], DataSet] | None = None
    while (task := tasks.get()) is not None:
        config = configs.RunConfig(**task["config"])

        def watch(record: Record) -> None:
            output.send(round=record.round + 1, accuracy=record.test_accuracy)

        try:
            if held is None or held[0] != configs.data_settings(config):
                held = (configs.data_settings(config), load_data(config))
            execute(config, Path(task["folder"]), watch=watch, data=held[1])
        except KeyboardInterrupt:
            output.send(end="interrupted")
            return
        except Exception as error:
            output.send(end="failed", why=f"{error}" or type(error).__name__)
        else:
            output.send(end="finished")


def main() -> None:
    """What the process does."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    output = Output()
    tasks: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    threading.Thread(target=read_tasks, args=(tasks,), daemon=True).start()
    work(tasks, output)


if __name__ == "__main__":
    main()
