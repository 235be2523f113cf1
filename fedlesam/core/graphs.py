"""Stretches of local steps as CUDA graphs: recorded once for each form of a batch, then replayed without Python.

A stretch has one forward and backward pass, and what a step does before and after it (recorded.py). It reads and writes
tensors that never move, so its graph holds for every client and round. Seeds are set between replays of what draws: a
graph draws from the generator as it is then, so both passes of a step see the same mask, as without graphs.
"""

import logging
import random
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedlesam.core import seeds
from fedlesam.core.batches import Batch
from fedlesam.core.buffers import Buffers, Unsupported
from fedlesam.core.tree import leaves, tree_map

log = logging.getLogger(__name__)

REHEARSALS = 3
"""Runs of a form before it is recorded, as PyTorch asks for: they are steps as any other."""
MOST = 16
"""Forms that are recorded; they share the memory of their passes."""
ON_HOST = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

Work = Callable[[Batch], Tensor]
"""A stretch of a step on a batch; it returns the loss."""


class Recorder(Protocol):
    """Records what a device is told to do."""

    def rehearse(self, work: Callable[[], Tensor]) -> Tensor:
        """Do the work as it will be recorded.

        Args:
            work: A pass; it returns its loss.
        """
        ...

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Record the work without doing it: what does it, and where its result will be.

        Args:
            work: A pass; it returns its loss.
        """
        ...


class CudaRecorder(Recorder):
    """Records on a stream of its own. All graphs share one pool of memory: nothing in it is needed after a replay.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()

    def rehearse(self, work: Callable[[], Tensor]) -> Tensor:
        here = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            found = work()
        here.wait_stream(self.stream)
        return found

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        graph = torch.cuda.CUDAGraph()
        recording = torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local")
        try:
            with torch.cuda.device(self.device), recording:
                found = work()
        except RuntimeError as error:  # PyTorch's allocator and generator may be left as in a recording
            raise Unsupported(f"the step cannot be recorded ({error}); use --no-cuda-graphs") from error
        return graph.replay, found


class Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What is done, operation by operation with its numbers, and why a graph could not repeat it.

    Args:
        device: Operations elsewhere cannot be part of its graph.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device.type
        self.operations: list[tuple[Any, ...]] = []
        self.why: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given, made = tree_leaves((args, kwargs)), tree_leaves(found)
        tensors = [t for t in (*given, *made) if isinstance(t, Tensor)]
        self.operations.append((func, *(t.shape if isinstance(t, Tensor) else t for t in given)))
        if _reads(func, args):
            self.why = self.why or f"{func} is read on the host"
        elif any(t.device.type != self.device for t in tensors):
            self.why = self.why or f"{func} uses a tensor that is not on {self.device}"
        return found


class Graphs:
    """The steps of one model. What cannot be recorded runs as it would without graphs, and the log says why.

    Args:
        device: where the model is.
        buffers: of the model; one that replaces them cannot be recorded.
        recorder: makes what records, when it is first needed.
    """

    def __init__(
        self,
        device: torch.device,
        buffers: Buffers,
        recorder: Callable[[torch.device], Recorder] = CudaRecorder,
    ) -> None:
        self.device, self.buffers, self.make = device, buffers, recorder
        self.recorder: Recorder | None = None
        self.refused: str | None = None
        self.rehearsed: dict[Hashable, list[list[tuple[Any, ...]]]] = {}
        self.recorded: dict[Hashable, tuple[Callable[[], None], Tensor]] = {}
        self.drawing: set[Hashable] = set()
        """Forms that drew random numbers in a rehearsal; the replays of others need no seed."""
        self._inputs: dict[Hashable, tuple[Batch, list[Tensor]]] = {}
        self._filled: dict[Hashable, Batch] = {}
        self._numbers: dict[str, Tensor] = {}
        self._rules: object = None

    def number(self, name: str, value: float | Tensor) -> Tensor:
        """A number as a tensor that never moves, in double precision: results are those of the number itself.

        Args:
            name: of the number.
            value: it is not read if it is a tensor.
        """
        if name not in self._numbers:
            self._numbers[name] = torch.zeros((), dtype=torch.float64, device=self.device)
        return self._numbers[name].fill_(value)

    def keep_only(self, rules: object) -> None:
        """Forget the graphs of other rules: those of earlier rounds, if numbers of a rule follow the rounds.

        Args:
            rules: whatever a graph has fixed; graphs are kept if it is equal to the last one.
        """
        if rules != self._rules:
            self._rules = rules
            self.rehearsed.clear()
            self.recorded.clear()
            self.drawing.clear()

    def refuse(self, why: str) -> None:
        """Record nothing any more.

        Args:
            why: for the log.
        """
        if self.refused is None:
            self.refused = why
            log.warning("no CUDA graphs: %s; training continues without them", why)

    def run(self, what: Hashable, work: Work, batch: Batch, seed: Callable[[], None]) -> Tensor:
        """The result of the work itself, or of a replay of it, which the next replay overwrites.

        Args:
            what: tells apart works that differ in more than the form of the batch.
            work: a stretch of a step.
            batch: its batch, on the device.
            seed: sets what layers draw from; it is called first, but for a replay that draws nothing.
        """
        given = leaves(batch)
        if self.refused is not None or not all(isinstance(leaf, Tensor) for leaf in given):
            seed()
            return work(batch)
        shape = tuple((leaf.shape, leaf.dtype) for leaf in given)
        form = what, shape
        if form not in self.recorded or form in self.drawing:
            seed()
        if form not in self.recorded:
            if len(self.rehearsed.setdefault(form, [])) < REHEARSALS:
                return self._rehearse(form, work, batch)
            if len(self.recorded) >= MOST:
                return work(batch)
        if shape not in self._inputs:
            inputs = tree_map(torch.clone, batch)
            self._inputs[shape] = inputs, leaves(inputs)
        inputs, places = self._inputs[shape]
        if self._filled.get(shape) is not batch:  # the second pass of a step has the batch of the first
            self._filled = {shape: batch}
            for into, leaf in zip(places, given, strict=True):
                into.copy_(leaf)
        if form not in self.recorded:
            assert self.recorder is not None
            self.recorded[form] = self.recorder.record(lambda: work(inputs))
        replay, found = self.recorded[form]
        replay()
        return found

    def _rehearse(self, form: Hashable, work: Work, batch: Batch) -> Tensor:
        """The first run of a form may set up what it needs; the others must be alike."""
        self.recorder = self.recorder or self.make(self.device)
        before, state, held = _host_draws(), seeds.state(self.device), self.buffers.tensors()
        with Watched(self.device) as seen:
            found = self.recorder.rehearse(lambda: work(batch))
        done = self.rehearsed[form]
        if seeds.state(self.device) != state:
            self.drawing.add(form)
        if any(now is not held[name] for name, now in self.buffers.tensors().items()):
            seen.why = seen.why or "the model replaces its buffers"
        if _host_draws() != before and self.device.type == "cuda":
            seen.why = seen.why or "the model draws random numbers on the CPU"
        if len(done) > 1 and done[-1] != seen.operations:
            seen.why = seen.why or "the model does other operations in other steps"
        done.append(seen.operations if done else [])
        if seen.why is not None:
            self.refuse(seen.why)
        return found


def _reads(func: Any, args: Any) -> bool:
    """Whether an operation needs numbers on the host. Choosing by a mask does: it counts; by indices it does not."""
    if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_):
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return bool(ON_HOST & set(func.tags))


def _host_draws() -> tuple[Any, ...]:
    """The generators of the CPU, as they are now."""
    _, keys, *place = np.random.get_state()  # noqa: NPY002
    return random.getstate(), bytes(np.asarray(keys)), place, torch.default_generator.get_state().numpy().tobytes()
