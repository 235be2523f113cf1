"""Runs of a sweep that differ in seed or in numbers, trained in lockstep as one computation (`--stack-runs`)."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from fedlesam.engines.signals import handle_signals
from fedlesam.engines.stack import Stack
from fedlesam.federation import count_active
from fedlesam.runs.config import RunConfig, data_settings

FULL = 4
"""Stacks that the runs of a company fill: clients with as many steps then find each other."""


def key(config: RunConfig) -> tuple[object, ...]:
    """The same for runs that can share most of their computations; whether two clients do, the stack decides.

    Args:
        config: Resolved settings.
    """
    how = config.stack_runs, config.compile, config.precision, config.device
    return *how, config.algorithm, config.model, config.split.partition(":")[0], *data_settings(config)


def most(config: RunConfig) -> int:
    """The runs that are trained in lockstep at most; without `stack_runs` one.

    Args:
        config: Resolved settings.
    """
    return 1 if config.stack_runs is None else FULL * per_stack(config)


def per_stack(config: RunConfig) -> int:
    """The runs whose clients fill one stack; without `stack_runs` one.

    Args:
        config: Resolved settings.
    """
    if config.stack_runs is None:
        return 1
    active = config.active if config.clients is None else count_active(config.active, config.clients)
    return max(1, config.stack_runs // max(1, int(active)))


def companies(configs: Sequence[RunConfig], parts: int = 1) -> list[list[int]]:
    """The runs in groups that are trained together, by their numbers.

    Args:
        configs: Resolved settings of each run.
        parts: Groups to make at least where runs could share one, for as many processes.
    """
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, config in enumerate(configs):
        alike[(i,) if config.stack_runs is None else key(config)].append(i)
    found = []
    for some in alike.values():
        first = configs[some[0]]
        groups = max(math.ceil(len(some) / most(first)), min(parts, len(some)))
        full, size = per_stack(first), math.ceil(len(some) / groups)
        whole = math.ceil(size / full) * full
        size = whole if math.ceil(len(some) / whole) == groups else size
        found += [some[start : start + size] for start in range(0, len(some), size)]
    return found


def train_together(config: RunConfig, runs: Sequence[Callable[[Stack | None], None]]) -> None:
    """Train the runs of a company; Ctrl-C stops all of them.

    Args:
        config: Of one of them.
        runs: Train one run each, on the stack they are given; they handle what they raise.
    """
    if config.stack_runs is None:
        for run in runs:
            run(None)
        return
    stack = Stack(config.stack_runs, config.compile)
    with handle_signals(stack.stop):
        stack.run([lambda run=run: run(stack) for run in runs])  # type: ignore[misc]
