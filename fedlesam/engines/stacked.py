"""Clients of a small model trained as one computation: the local loop of core/client.py, mapped over clients.

It pays where a step is too small to keep a core busy (benchmarks/stacked.py): a multilayer perceptron, not a
convolution on pictures. The results are those of the serial engine to rounding.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from fedlesam.core import seeds
from fedlesam.core.batches import Batches, steps_per_epoch
from fedlesam.core.messages import Broadcast, Memory, Results
from fedlesam.core.slots import Algorithm
from fedlesam.core.tree import named_tensors
from fedlesam.engines._feed import Member, can_fill_up, samples_are_apart
from fedlesam.engines._forms import model_form
from fedlesam.engines._mapped import MappedStep
from fedlesam.engines._mapped import NotStackable as NotStackable
from fedlesam.engines._numbers import numbers_of
from fedlesam.engines._rows import Run
from fedlesam.engines._stack import CHANGES as CHANGES
from fedlesam.engines._stack import Entry, Feed, feed_of, train_stack
from fedlesam.engines.base import is_client_error
from fedlesam.engines.serial import SerialEngine
from fedlesam.engines.stack import Request, Stack

LARGEST = 64_000_000
"""Entries of the stacked weights at a time."""
KEPT = 1 << 24
"""Entries of clients' samples that a federation of a shared stack keeps from round to round."""
CACHED, LEAST = 1 << 18, 8
"""The same for a compiled step, about what a core's cache holds; but not fewer clients than this."""


def check_stackable(workers: int, stack_runs: int | None, threads: int | None) -> None:
    """A ValueError for settings that this engine would not keep to.

    Args:
        workers: processes of the run.
        stack_runs: rows of a stack that runs share.
        threads: of a process; None is PyTorch's choice.
    """
    if workers > 1:
        raise ValueError(
            f"the stacked engine needs one worker, got {workers}: the size of a stack changes the last bits of the "
            "results, and workers would make stacks of other sizes; use one worker, or the plain engine"
        )
    if stack_runs is not None and threads not in (None, 1):
        raise ValueError(f"stack_runs needs one thread, got {threads}: use several jobs of a sweep instead")


@dataclass
class StackedEngine(SerialEngine):
    """Stacks the active clients; one that cannot be, or whose numbers are not finite, trains by itself.

    Clients with other numbers of samples share a stack where the loss can ignore what fills their batches up.
    """

    least: ClassVar[int] = 2
    """Clients of a stack: a step of fewer is faster in the plain loop."""
    compile_step: bool = False
    """Compile the step of all clients as one function."""
    stack: Stack | None = None
    """Where clients of this and of other federations are trained together; None stacks those of this one alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(isinstance(module, torch.jit.ScriptModule) for module in self.model.module.modules()):
            raise NotStackable(
                "the stacked engine cannot train a scripted model, whose weights cannot be replaced; give the module "
                "as it was before torch.jit.script, or use the plain engine"
            )
        self.step = MappedStep(self.model, self.task, self.compile_step)
        self.widest = 0
        """The clients of the largest stack: smaller ones are filled up to it, for a compiled step has one shape."""
        self.form = model_form(self.model)
        self._held: dict[int, _Samples] = {}
        """Samples that are kept from round to round, up to KEPT entries."""
        self._room = KEPT
        self._apart: bool | None = None
        self._numbered: tuple[Algorithm, dict[str, dict[str, float]]] | None = None
        """The method of the last round with its numbers."""
        if self.stack is not None:
            self.stack.flags.add(self.stop_flag)

    def results(self, broadcast: Broadcast, share: Sequence[int], before_step: Callable[[], None]) -> Iterator[Results]:
        algorithm = self.algorithm.at(broadcast.round)
        if self._numbered is None or self._numbered[0] is not algorithm:
            self._numbered = algorithm, numbers_of(algorithm, self.local)
        run = Run(algorithm, self.local, broadcast, self._numbered[1])
        entries, alone, on_host = [], [], self.model.device.type == "cpu"
        for client in share:
            self.training = client
            try:
                member, memory = self._member(broadcast.round, client), self.store.get(client, Memory())
            except Exception as error:
                if not is_client_error(error):
                    raise
                alone.append(client)  # the plain loop says why
            else:
                entries.append(Entry(member, run, memory if on_host else memory.to(self.model.device)))
        stacks = self._alone(entries, before_step) if self.stack is None else self._shared(run, entries, before_step)
        for results in stacks:
            answered = {result.client for result in results.clients}
            entries = [entry for entry in entries if entry.member.client not in answered]
            steps = sum(result.result.steps for result in results.clients)
            self.model.backward_passes += steps * self.algorithm.perturbation.passes
            yield results
        alone += [entry.member.client for entry in entries]
        yield from super().results(broadcast, alone, before_step)  # one by one: who fails, and why

    def computing(self) -> AbstractContextManager[None]:
        return super().computing() if self.stack is None else self.stack.computing(self.threads, self.model)

    def _shared(self, run: Run, entries: list[Entry], before_step: Callable[[], None]) -> Iterator[Results]:
        """The results of a stack that is shared; samples that are no tensors may fail, so they are not in it."""
        assert self.stack is not None
        sound = [entry for entry in entries if entry.member.data.tensors is not None]
        trained = self.stack.train(Request(self.model, self.form, self.task, run, sound, before_step))
        self.waited += trained.waited
        yield from trained.results

    def _alone(self, entries: list[Entry], before_step: Callable[[], None]) -> Iterator[Results]:
        """The results of stacks of this federation's clients alone."""
        alike: dict[tuple[object, ...], list[Entry]] = defaultdict(list)
        for entry in entries:
            alike[entry.member.kind].append(entry)
        for some in alike.values():
            some.sort(key=lambda entry: entry.steps, reverse=True)
            for group in self._stacks(some):
                if len(group) < self.least:
                    continue
                width = self.widest = max(self.widest, len(group)) if self.step.compile else len(group)
                try:
                    feed = self._feed([entry.member for entry in group], width)
                    results = train_stack(self.step, group, feed, width, False, before_step)
                except NotStackable:
                    raise
                except Exception as error:
                    if not is_client_error(error):
                        raise
                else:
                    yield from self.step.sums(results, [0] * len(results), width, self.step.compile).values()

    def _stacks(self, entries: list[Entry]) -> Iterator[list[Entry]]:
        """Stacks of nearly equal size."""
        most = self.most_rows(max(entry.member.entries for entry in entries))
        size = math.ceil(len(entries) / math.ceil(len(entries) / most))
        for start in range(0, len(entries), size):
            yield entries[start : start + size]

    def most_rows(self, entries: int) -> int:
        """Clients of a stack of this federation alone: a compiled step is fastest where its rows stay in the cache.

        Args:
            entries: of the samples of the largest client.
        """
        weights = self.model.weights.numel()
        most = max(1, LARGEST // max(weights, entries))
        return min(most, max(LEAST, CACHED // weights)) if self.step.compile else most

    def _feed(self, members: list[Member], width: int) -> Feed:
        return feed_of(self.local, members, width, self.step.compile)

    def _member(self, round: int, client: int) -> Member:
        data, entries, kind, fills = self._samples(client)
        masked = self.algorithm.perturbation.draws or data.tensors is None
        per_epoch = steps_per_epoch(data.size, self.local.batch_size, join_last=False)
        steps = self.local.steps_of(self.seed, round, client, per_epoch)
        mask = seeds.derive(self.seed, "step", round, client) if masked else 0
        kind = kind if fills else (*kind, data.size, steps)
        return Member(client, data, data.size, steps, self.seed, round, kind, entries, mask, fills)

    def _samples(self, client: int) -> "_Samples":
        """A client's samples; small ones are kept, for making them takes longer than its part of a stack's round."""
        found = self._held.get(client)
        if found is None:
            data = Batches(self.clients[client], self.model.device, self.task.collate)
            named = [] if data.tensors is None else named_tensors(data.tensors)
            entries = max((tensor.numel() for _, tensor in named), default=0)
            kind: tuple[object, ...] = ()
            fills = False
            if named and self.local.augment is None:
                kind = tuple((name, tensor.shape[1:], tensor.dtype) for name, tensor in named)
                fills = can_fill_up(self.task, self.algorithm, data) and self._keeps_apart(data)
            found = _Samples(data, entries, kind, fills)
            if 0 < entries <= self._room:
                self._held[client] = found
                self._room -= entries
        return found

    def _keeps_apart(self, data: Batches) -> bool:
        """Whether the model looks at each sample of a batch by itself; asked once, of a client with two."""
        if self._apart is None and len(data) > 1:
            self._apart = samples_are_apart(self.model, self.task, data)
        return self._apart is not False


class _Samples(NamedTuple):
    data: Batches
    entries: int
    """Of the largest tensor."""
    kind: tuple[object, ...]
    """What is the same for clients that can share a stack."""
    fills: bool
    """Whether clients of other sizes can be in it, too."""
