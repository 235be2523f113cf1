"""A device that is not the CPU, with what can be had without a GPU: the meta device, whose reads give zeros."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class ReadsGiveZeros(TorchDispatchMode):
    """What is copied from the meta device to the host is zeros. All else is as there: no CPU tensor may be mixed in."""

    def __init__(self) -> None:
        super().__init__()
        self.read = self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        on_meta = [t for t in given if t.is_meta]
        if name == "aten._local_scalar_dense.default" and on_meta:
            self.read += 1
            return torch.zeros((), dtype=on_meta[0].dtype).item()
        if name == "aten._to_copy.default" and on_meta and torch.device(kwargs.get("device") or "meta").type == "cpu":
            self.read += 1
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        out = func(*args, **kwargs)
        to_meta = any(isinstance(t, Tensor) and t.is_meta for t in tree_leaves(out))
        self.sent += to_meta and any(not t.is_meta and (t.ndim > 0 or not on_meta) for t in given)
        return out
