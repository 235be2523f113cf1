"""Forward and backward passes as CUDA graphs: recorded once for each form of a batch, then replayed without Python.

A pass reads the one vector of weights and writes the one vector of gradients, which never move. So its graph holds for
every client, round and rule, and a step with two passes is two replays. Seeds are set between replays: a graph draws
from the generator as it is then, so both passes of a step see the same mask, as without graphs.
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

from fedlesam.core.batches import Batch
from fedlesam.core.buffers import Buffers, Unsupported
from fedlesam.core.tree import leaves, tree_map

log = logging.getLogger(__name__)

REHEARSALS = 3
"""Passes of a form before it is recorded, as PyTorch asks for: they are steps as any other."""
MOST = 8
"""Forms that are recorded; each keeps its inputs, and they share the memory of their passes."""
ON_HOST = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

Pass = Callable[[Batch], Tensor]
"""A forward and backward pass on a batch; it returns the loss."""


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
    """What a pass does, operation by operation, and why a graph could not repeat it.

    Args:
        device: Operations elsewhere cannot be part of its graph.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device.type
        self.operations: list[tuple[Hashable, ...]] = []
        self.why: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, found)) if isinstance(t, Tensor)]
        self.operations.append((func, *(t.shape for t in tensors)))
        if _reads(func, args):
            self.why = self.why or f"{func} is read on the host"
        elif any(t.device.type != self.device for t in tensors):
            self.why = self.why or f"{func} uses a tensor that is not on {self.device}"
        return found


class Graphs:
    """The passes of one model. What cannot be recorded runs as it would without graphs, and the log says why.

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
        self.rehearsed: dict[Hashable, list[list[tuple[Hashable, ...]]]] = {}
        self.recorded: dict[Hashable, tuple[list[Tensor], Callable[[], None], Tensor]] = {}

    def run(self, what: Hashable, work: Pass, batch: Batch) -> Tensor:
        """The loss of a batch; the work itself, or a replay of it.

        Args:
            what: tells apart works that differ in more than the form of the batch.
            work: the pass.
            batch: its batch, on the device.
        """
        given = leaves(batch)
        if self.refused is not None or not all(isinstance(leaf, Tensor) for leaf in given):
            return work(batch)
        form = (what, *((leaf.shape, leaf.dtype) for leaf in given))
        if form not in self.recorded:
            if len(self.rehearsed.setdefault(form, [])) < REHEARSALS:
                return self._rehearse(form, work, batch)
            if len(self.recorded) >= MOST:
                return work(batch)
            self._record(form, work, batch)
        inputs, replay, loss = self.recorded[form]
        for into, leaf in zip(inputs, given, strict=True):
            into.copy_(leaf)
        replay()
        return loss.clone()

    def _rehearse(self, form: Hashable, work: Pass, batch: Batch) -> Tensor:
        """The first pass of a form may set up what it needs; the others must be alike."""
        self.recorder = self.recorder or self.make(self.device)
        before, held = _host_draws(), self.buffers.tensors()
        with Watched(self.device) as seen:
            found = self.recorder.rehearse(lambda: work(batch))
        done = self.rehearsed[form]
        if any(now is not held[name] for name, now in self.buffers.tensors().items()):
            seen.why = seen.why or "the model replaces its buffers"
        if _host_draws() != before and self.device.type == "cuda":
            seen.why = seen.why or "the model draws random numbers on the CPU"
        if len(done) > 1 and done[-1] != seen.operations:
            seen.why = seen.why or "the model does other operations in other steps"
        done.append(seen.operations if done else [])
        if seen.why is not None:
            self.refused = seen.why
            log.warning("no CUDA graphs: %s; training continues without them", seen.why)
        return found

    def _record(self, form: Hashable, work: Pass, batch: Batch) -> None:
        assert self.recorder is not None
        inputs = tree_map(torch.clone, batch)
        replay, loss = self.recorder.record(lambda: work(inputs))
        self.recorded[form] = leaves(inputs), replay, loss


def _reads(func: Any, args: Any) -> bool:
    """Whether an operation needs numbers on the host. Choosing by a mask does: it counts; by indices it does not."""
    if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_):
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return bool(ON_HOST & set(func.tags))


def _host_draws() -> tuple[Any, ...]:
    """The generators of the CPU, as they are now."""
    _, keys, *place = np.random.get_state()  # noqa: NPY002
    return random.getstate(), bytes(np.asarray(keys)), place, torch.default_generator.get_state().numpy().tobytes()
