"""A stack of fixed width that several federations share: the runs of a sweep as one computation.

Every row has its own model, data and numbers, and every computation the same shapes. So a client's result does not
depend on who shares the stack, bit for bit. That is a property of the kernels, and it is checked once for each
program: for every method, and every form of its rows and batches.
"""

import contextlib
import gc
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod, WeakSet

import torch

from fedlesam.core.computing import compute_context, settled_objects
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.local import LocalTraining
from fedlesam.core.messages import Results
from fedlesam.core.slots import Algorithm
from fedlesam.core.task import Task
from fedlesam.engines._mapped import MappedStep, NotStackable
from fedlesam.engines._numbers import without_numbers
from fedlesam.engines._rows import Run
from fedlesam.engines._stack import Entry, feed_of, train_stack
from fedlesam.engines.base import is_client_error
from fedlesam.engines.lockstep import Lockstep
from fedlesam.engines.signals import StopFlag

log = logging.getLogger("fedlesam")

RARELY = 5000
"""New objects after which Python looks for garbage; by itself it looks after 700 or 2000."""


@dataclass
class Request:
    """What a federation wants trained."""

    model: FlatModel
    """The federation's, in whose place the clients' rows are trained."""
    form: tuple[object, ...]
    """Of the model, as `model_form` has it."""
    task: Task
    """How a batch becomes a loss."""
    run: Run
    """The federation's round."""
    entries: list[Entry]
    """Its clients, with their memories."""
    before_step: Callable[[], None]
    """Called before every step; it may raise."""


@dataclass
class Trained:
    """What the stack gives back."""

    results: list[Results]
    """Of the clients whose numbers are finite."""
    waited: float
    """Seconds that were spent on other federations."""


@dataclass
class _Method:
    """The clients that share computations: everything but numbers, weights and data is the same."""

    key: Any
    step: MappedStep
    waiting: list[tuple[int, Entry]] = field(default_factory=list)
    """The clients to train now, with the number of their request."""


class Stack:
    """Trains the clients of federations that meet here.

    Args:
        width: rows of a computation.
        compile: whether steps are compiled.
    """

    def __init__(self, width: int, compile: bool) -> None:
        self.width, self.compile = width, compile
        self.running = False
        """Whether `run` runs: it sets the threads and restores the CPU's generators, so rounds need not."""
        self.flags: WeakSet[StopFlag] = WeakSet()
        self._methods: list[_Method] = []
        self._told = False
        self._known: WeakKeyDictionary[FlatModel, dict[object, tuple[_Method, Algorithm, LocalTraining, object]]]
        self._known = WeakKeyDictionary()
        """What a federation trained with in its last round: to compare whole methods takes longer."""
        train = WeakMethod(self._train)  # in a cycle a stack would stay until garbage is looked for

        def answer(requests: list[Request]) -> list[Trained | BaseException]:
            method = train()
            assert method is not None
            return method(requests)

        self._meeting: Lockstep[Request, Trained] = Lockstep(answer)

    def run(self, functions: Sequence[Callable[[], None]]) -> None:
        """Run functions whose federations use this stack, in lockstep.

        Args:
            functions: called in this thread, each up to its next question; they handle what they raise.
        """
        with compute_context(1, torch.device("cpu")), settled_objects, _rare_collections():
            self.running = True
            try:
                self._meeting.run(functions)
            finally:
                self.running = False

    def computing(self, threads: int | None, model: FlatModel) -> AbstractContextManager[None]:
        """The process while clients are trained or models evaluated.

        Args:
            threads: to compute with.
            model: of a federation.
        """
        if self.running and model.device.type == "cpu" and model.precision != "tf32":
            return contextlib.nullcontext()
        return compute_context(threads, model.device, model.precision)

    def stop(self, signum: int) -> None:
        """All federations drop the round under way.

        Args:
            signum: the signal that asks for it.
        """
        for flag in list(self.flags):
            flag.request(signum)

    def train(self, request: Request) -> Trained:
        """Train clients, together with those of the other federations.

        Args:
            request: the clients.
        """
        began = time.perf_counter()
        found = self._meeting.ask(request)
        return Trained(found.results, max(0.0, time.perf_counter() - began + found.waited))

    def _train(self, requests: list[Request]) -> list[Trained | BaseException]:
        """`waited` is less than nothing here: minus the seconds that count as the federation's own."""
        answers: list[Trained | BaseException] = [Trained([], 0.0) for _ in requests]
        for number, request in enumerate(requests):
            found = {kind: self._method(request, kind) for kind in {entry.member.kind for entry in request.entries}}
            for entry in request.entries:
                found[entry.member.kind].waiting.append((number, entry))

        checks = list(dict.fromkeys(request.before_step for request in requests))
        turn = itertools.cycle(checks)

        def before_step() -> None:
            next(turn)()  # all of them are called before every stack, and a signal stops them all

        try:
            for method in self._methods:
                waiting = sorted(method.waiting, key=lambda pair: (-pair[1].steps, pair[1].memory.names))
                for start in range(0, len(waiting), self.width):
                    for check in checks:
                        check()
                    self._train_some(method, waiting[start : start + self.width], answers, before_step)
        finally:
            for method in self._methods:
                method.waiting = []
        return answers

    def _train_some(
        self,
        method: _Method,
        some: list[tuple[int, Entry]],
        answers: list[Trained | BaseException],
        before_step: Callable[[], None],
    ) -> None:
        began, entries = time.perf_counter(), [entry for _, entry in some]
        try:
            with self.computing(1, method.step.model):
                step, members = method.step, [entry.member for entry in entries]
                feed = feed_of(entries[0].run.local, members, self.width, True)
                trained = train_stack(step, entries, feed, self.width, True, before_step)
                results = step.sums(trained, [number for number, _ in some], self.width, step.compile)
        except NotStackable as error:
            for number in {number for number, _ in some}:
                answers[number] = error
            return
        except Exception as error:
            if not is_client_error(error):
                raise
            return  # the plain loop says why
        each = (time.perf_counter() - began) / sum(entry.steps for entry in entries)
        for number, entry in some:
            if isinstance(answer := answers[number], Trained):
                answer.waited -= each * entry.steps
        for number, own in results.items():
            if isinstance(answer := answers[number], Trained):
                answer.results.append(own)

    def _method(self, request: Request, kind: tuple[object, ...]) -> _Method:
        run = request.run
        sent = tuple(run.broadcast.perturbation), tuple(run.broadcast.correction)
        known = self._known.setdefault(request.model, {})
        if kind in known:
            method, *before = known[kind]
            if before[0] is run.algorithm and before[1] is run.local and before[2] == sent:
                return method
        key = (without_numbers(run.algorithm, run.local), request.task, request.form), sent, kind
        found = next((method for method in self._methods if method.key == key), None)
        if found is None:
            apart = any((known.key[0][:2], *known.key[1:]) == (key[0][:2], *key[1:]) for known in self._methods)
            if apart and not self._told:
                self._told = True
                log.info("runs whose models differ in an attribute do not share a computation")
            found = _Method(key, MappedStep(request.model, request.task, self.compile, check=True))
            self._methods.append(found)
        known[kind] = found, run.algorithm, run.local, sent
        return found


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Look for garbage less often: rounds leave none, and looking takes a fortieth of the time."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(RARELY, before[0]), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
