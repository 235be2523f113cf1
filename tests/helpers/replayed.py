"""A stand-in for CUDA graphs on the CPU: tensor operations are recorded, and repeated on the same memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """Every operation with its arguments and results. A replay runs no Python of the model, as on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = [t for t in tree_leaves(found) if isinstance(t, Tensor)]
        fresh = [t for t in made if t.untyped_storage().data_ptr() not in given]
        if fresh or func._schema.is_mutable:  # a view is where it was
            self.entries.append((func, args, kwargs or {}, fresh))
        return found

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, fresh in self.entries:
            found = func(*args, **kwargs)
            if fresh:
                made = [t for t in tree_leaves(found) if isinstance(t, Tensor)]
                for into, value in zip(fresh, made[-len(fresh) :], strict=True):
                    into.copy_(value)


class TapeRecorder:
    """As `CudaRecorder`: a recording does nothing yet. What it did to memory is taken back before it is replayed."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.replays, self.records = device, 0, 0
        self.silent = False
        """Replays do nothing, as Python sees it on a GPU."""

    def rehearse(self, work: Callable[[], Tensor]) -> Tensor:
        return work()

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        generator = torch.get_rng_state()
        with Undone() as undone, Tape() as tape:
            loss = work()
        undone.undo()
        torch.set_rng_state(generator)
        self.records += 1

        def replay() -> None:
            self.replays += 1
            if not self.silent:
                tape.replay()

        return replay, loss


class Undone(TorchDispatchMode):
    """Remembers what all tensors held before an operation: not every schema tells what it changes (batch_norm)."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.before += [(t, t.clone()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        return func(*args, **(kwargs or {}))

    @torch.no_grad()
    def undo(self) -> None:
        for tensor, value in reversed(self.before):
            tensor.copy_(value)
