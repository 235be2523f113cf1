"""A task and metrics by the text a user types."""

import dataclasses
import functools
from typing import get_args

from fedlesam.core import metrics as measures
from fedlesam.core.metrics import Metric
from fedlesam.core.names import imported, is_path, unknown
from fedlesam.core.task import Task, TaskName


@functools.cache
def task_of(name: str | None, metrics: str | None = None) -> Task:
    """The task of a run; the same object for the same text, so that runs can share a stack.

    Args:
        name: Of a ready one, or `module:callable`, which makes a Task or is one; None is classification.
        metrics: Names of metrics or `module:callable`, separated by spaces; they come before the task's own.
    """
    task = _task(name)
    more = dict(_metric(text) for text in (metrics or "").split())
    others = {name: metric for name, metric in task.measured.items() if name not in more}
    return dataclasses.replace(task, metrics={**more, **others})


def _task(name: str | None) -> Task:
    if name is None or name in get_args(TaskName):
        return Task.get(name or "classification")
    if not is_path(name):
        raise unknown("task", name, [*get_args(TaskName), "module:callable"])
    found = imported("task", name)
    if not isinstance(found, Task) and callable(found):
        found = found()
    if not isinstance(found, Task):
        raise ValueError(f"task {name}: must be an fl.Task, or make one without arguments, got {found!r}")
    return found


def _metric(text: str) -> tuple[str, Metric]:
    if text in measures.NAMED:
        return text, measures.NAMED[text]()
    if not is_path(text):
        raise unknown("metric", text, [*measures.NAMED, "module:callable"])
    found = imported("metric", text)
    if not isinstance(found, Metric) and not callable(found):
        raise ValueError(f"metric {text}: must be a function of (outputs, targets), or an fl.Metric, got {found!r}")
    return text.rpartition(":")[2].rpartition(".")[2], found if isinstance(found, Metric) else Metric(found)
