"""A process that trains one run after another for the sweep that started it.

Importing PyTorch once for many runs is what makes small runs cheap.
"""

import os
import queue
import signal
import sys
import threading
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fedlesam.core.computing import settled_objects
from fedlesam.data.dataset import DataSet
from fedlesam.engines.signals import Interrupted
from fedlesam.engines.stack import Stack
from fedlesam.federation import Record
from fedlesam.runs import config as configs
from fedlesam.runs import lock
from fedlesam.runs.build import load_data
from fedlesam.runs.config import RunConfig
from fedlesam.runs.evaluated import Measure, evaluated_on
from fedlesam.runs.runner import execute
from fedlesam.runs.stopping import first_metric
from fedlesam.runs.together import train_together

PATIENCE = 60.0
"""Seconds to wait for a run that another process holds: of a sweep that was killed, it is about to end."""

Tasks = queue.SimpleQueue[list[tuple[RunConfig, Path]] | None]
"""Settings and folder of each run, those in one list that are trained together; None is the end."""


def read_tasks(connection: Connection, tasks: Tasks) -> None:
    """When the connection closes the sweep has ended; the run under way is stopped.

    Args:
        connection: To the sweep.
        tasks: Where they go.
    """
    try:
        while True:
            tasks.put(connection.recv())
    except (EOFError, OSError):
        tasks.put(None)
        os.kill(os.getpid(), signal.SIGTERM)


def work(tasks: Tasks, connection: Connection) -> None:
    """Train the runs of the queue until there are no more, and send what happens to each.

    Args:
        tasks: Where they come from.
        connection: To the sweep.
    """

    data: DataSet | None = None
    loaded: tuple[object, ...] = ()
    stopped = False

    def send(what: str, **more: Any) -> None:
        try:
            connection.send({"what": what, **more})
        except OSError:  # the sweep was killed: stop with a checkpoint
            raise Interrupted(signal.SIGTERM) from None

    def run(number: int, config: RunConfig, folder: Path, stack: Stack | None) -> None:
        nonlocal data, loaded, stopped

        def watch(record: Record) -> None:
            found, state = first_metric(record), ""
            if found is not None:
                measure = Measure(found[0])
                state = f"{evaluated_on(config)} {measure.title} {measure.show(found[1], 1)}{measure.unit}"
            send("round", task=number, round=record.round + 1, state=state)

        try:
            if data is None or loaded != configs.data_settings(config):
                data, loaded = load_data(config), configs.data_settings(config)
            execute(config, folder, watch=watch, data=data, stack=stack)
        except KeyboardInterrupt:
            stopped = True
            send("interrupted", task=number, why="was interrupted; the same command resumes it")
        except Exception as error:
            send("failed", task=number, why=f"{error}" or type(error).__name__)
        else:
            send("finished", task=number)

    with settled_objects:
        while not stopped and (company := tasks.get()) is not None:
            for _, folder in company:
                wait_until_free(folder)
            train_together(company[0][0], [partial(run, number, *task) for number, task in enumerate(company)])


def wait_until_free(folder: Path) -> None:
    """Wait for the process that holds a run folder, but not for ever.

    Args:
        folder: A run folder.
    """
    end = time.monotonic() + PATIENCE
    while lock.holder(folder) is not None and time.monotonic() < end:
        time.sleep(0.1)


def main(handle: int) -> None:
    """What the process does.

    Args:
        handle: The open file of its connection to the sweep.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    connection, tasks = Connection(handle), Tasks()
    threading.Thread(target=read_tasks, args=(connection, tasks), daemon=True).start()
    work(tasks, connection)


if __name__ == "__main__":
    main(int(sys.argv[1]))
