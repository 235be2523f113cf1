"""What rules do before and after the steps of a stack, recorded: a map takes longer than what it computes.

Only what is surely made of the same operations each time: the Python of others may do another thing in the next call.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fedlesam.core.flat_model import FlatModel
from fedlesam.core.slots import Algorithm
from fedlesam.core.task import Supervised, Task
from fedlesam.engines._trees import Tree, leaves, map_tree

T = TypeVar("T")

AGAIN = 3
"""The call from which on a function is replayed: to record it takes as long as some ten calls."""
MOST = 64
"""Functions and shapes that are recorded."""
KNOWN = ("torch.", "fedlesam.")
"""Whose Python is known."""
PLAIN = (bool, int, float, str, tuple, type(None))
"""Attributes of a module that are settings."""


@dataclass
class _Known:
    key: object
    forms: list[object]
    calls: int = 0
    program: Callable[..., list[Tensor]] | None = None
    fails: bool = False
    """It cannot be recorded."""
    tree: Tree = field(default_factory=dict)
    """What the function returned, for its names."""
    rest: Any = None


class Replay:
    """Calls functions of trees of tensors. After some calls only the operations of one are run, not its Python.

    The bits are the same, since the operations are.
    """

    def __init__(self) -> None:
        self._known: list[_Known] = []

    def __call__(
        self, key: object, pure: bool, function: Callable[..., tuple[Tree, T]], *trees: Tree
    ) -> tuple[Tree, T]:
        """The tensors that a function returns, and what else it returns.

        Args:
            key: equal for calls that differ in tensors alone; what else the function returns is then the same.
            pure: whether the function is made of the same operations each time; if not, it is just called.
            function: changes none of its tensors.
            trees: what it is called with.
        """
        if not pure:
            return function(*trees)
        forms: list[object] = [tree_form(tree) for tree in trees]
        known = next((known for known in self._known if known.forms == forms and known.key == key), None)
        if known is None:
            known = _Known(key, forms)
            self._known = [*self._known[-MOST + 1 :], known]
        known.calls += 1
        if known.calls < AGAIN or known.fails:
            return function(*trees)
        flat = [leaf for tree in trees for leaf in leaves(tree)]
        if known.program is None:
            try:
                _record(known, function, trees, flat)
            except Exception:  # a map takes what a recording does not, such as a number that is read
                known.fails = True
                return function(*trees)
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
    names = torch.empty(0)
    known.tree = map_tree(known.tree, lambda _: names)


def form_of(tensor: Tensor) -> tuple[object, ...]:
    """All but its numbers: what a recorded function is for."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def tree_form(tree: Tree) -> list[object]:
    """The names of a tree, with all but the numbers of its tensors."""
    return [(name, tree_form(t) if isinstance(t, dict) else form_of(t)) for name, t in tree.items()]


def has_our_rules(algorithm: Algorithm) -> bool:
    """Whether both of a client's rules are of this package."""
    return all(type(rule).__module__.startswith("fedlesam.") for rule in (algorithm.perturbation, algorithm.correction))


def has_known_operations(model: FlatModel, task: Task, algorithm: Algorithm) -> bool:
    """Whether a step is made of the same operations each time: module, loss and rules are PyTorch's or ours."""
    loss, everywhere = task.loss, nn.modules.module
    if not isinstance(loss, Supervised) or loss.inputs or loss.outputs or loss.targets:
        return False
    if not isinstance(loss.compare, FunctionType) or loss.compare.__closure__ or not is_known(loss.compare):
        return False  # an object may have another setting in the next step
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return False
    return has_our_rules(algorithm) and all(map(_is_plain, model.module.modules()))


def _is_plain(module: nn.Module) -> bool:
    """Whether a module does what its class says."""
    if isinstance(module, torch.fx.GraphModule | torch.jit.ScriptModule) or not is_known(type(module)):
        return False
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return False
    return all(
        is_known(value) for value in vars(module).values() if callable(value) and not isinstance(value, nn.Module)
    )


def is_known(thing: Any) -> bool:
    """Whether a function or a class is PyTorch's or of this package.

    Args:
        thing: the function or the class.
    """
    return str(getattr(thing, "__module__", "")).startswith(KNOWN)


def settings_of(model: FlatModel) -> list[dict[str, object]]:
    """The plain attributes of all modules, such as a slope: a recorded step is for these."""
    return [{n: v for n, v in vars(module).items() if isinstance(v, PLAIN)} for module in model.module.modules()]
