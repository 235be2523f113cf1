"""What rules do before and after the steps of a stack, recorded: a map takes longer than what it computes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fedlesam.engines._trees import Tree, leaves, map_tree

T = TypeVar("T")

AGAIN = 3
"""The call from which on a function is replayed: to record it takes as long as some ten calls."""
MOST = 64
"""Functions and shapes that are recorded."""


@dataclass
class _Known:
    key: object
    forms: list[object]
    calls: int = 0
    program: Callable[..., list[Tensor]] | None = None
    tree: Tree = field(default_factory=dict)
    """What the function returned, for its names."""
    rest: Any = None


class Replay:
    """Calls functions of trees of tensors. After some calls only the operations of one are run, not its Python.

    The bits are the same, since the operations are.
    """

    def __init__(self) -> None:
        self._known: list[_Known] = []

    def __call__(self, key: object, function: Callable[..., tuple[Tree, T]], *trees: Tree) -> tuple[Tree, T]:
        """The tensors that a function returns, and what else it returns.

        Args:
            key: equal for calls that differ in tensors alone; what else the function returns is then the same.
            function: changes none of its tensors.
            trees: what it is called with.
        """
        forms: list[object] = [_form(tree) for tree in trees]
        known = next((known for known in self._known if known.forms == forms and known.key == key), None)
        if known is None:
            known = _Known(key, forms)
            self._known = [*self._known[-MOST + 1 :], known]
        known.calls += 1
        if known.calls < AGAIN:
            return function(*trees)
        flat = [leaf for tree in trees for leaf in leaves(tree)]
        if known.program is None:
            _record(known, function, trees, flat)
        assert known.program is not None
        made = iter(known.program(*flat))
        return map_tree(known.tree, lambda _: next(made)), known.rest


def _record(
    known: _Known, function: Callable[..., tuple[Tree, Any]], trees: tuple[Tree, ...], flat: list[Tensor]
) -> None:
    def pure(*tensors: Tensor) -> list[Tensor]:
        left = iter(tensors)
        known.tree, known.rest = function(*(map_tree(tree, lambda _: next(left)) for tree in trees))
        return leaves(known.tree)

    known.program = make_fx(pure)(*flat).forward
    known.tree = map_tree(known.tree, lambda _: flat[0])  # the names; not what was made while recording


def form_of(tensor: Tensor) -> tuple[object, ...]:
    """All but its numbers: what a recorded function is for."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _form(tree: Tree) -> list[object]:
    """The names of a tree, with all but the numbers of its tensors."""
    return [
        (name, _form(t) if isinstance(t, dict) else (t.shape, t.stride(), t.dtype, t.device))
        for name, t in tree.items()
    ]
