"""Whether rules compute on the device alone: a client's round on the meta device, whose tensors cannot be read."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedlesam.core.lesson import Lesson
from fedlesam.core.local import LocalTraining
from fedlesam.core.messages import Memory
from fedlesam.core.server import ServerState
from fedlesam.core.slots import Algorithm, TensorSpec
from fedlesam.core.step import begin, finish, look, move

STEPS = 3


def check_on_device(algorithm: Algorithm) -> None:
    """A ValueError if a rule keeps a GPU waiting in a client's round.

    It does if it reads a number of a vector on the host, as `float(norm)` does, or sends a tensor from the host in a
    step, as `torch.tensor(rho, device=v.device)` does. A rule that draws random numbers without `step.noise` is
    refused, too.

    Args:
        algorithm: the method; its rules may be your own.
    """
    anchor = torch.zeros(9, device="meta")
    algorithm = algorithm.for_model([TensorSpec("weight", torch.Size((3, 2))), TensorSpec("bias", torch.Size((3,)))])
    state, memory = ServerState.initial(algorithm, anchor, {}), Memory()
    for local in (LocalTraining(), LocalTraining(momentum=0.5, clip_scope="corrected")):
        try:
            memory = _round(algorithm, local, state, memory)
        except RuntimeError as error:
            if "meta" not in str(error):
                raise
            raise ValueError(
                f"{algorithm!r} reads a number of a vector on the host ({str(error).splitlines()[0]}), so a GPU would "
                "wait for it; use torch.where in place of `if`, and tensors in place of float()"
            ) from error


def _round(algorithm: Algorithm, local: LocalTraining, state: ServerState, memory: Memory) -> Memory:
    """What the client remembers afterwards."""
    sent = state.sent(algorithm)

    def gradient(at: Tensor, out: Tensor, *, final: bool, lesson: Lesson | None = None) -> Tensor:
        out.copy_(at)
        if lesson is None:
            return at.sum()
        outputs, taught = at[:6].view(2, 3), lesson.teacher[:6].view(2, 3)
        return lesson.rule.distil(outputs, taught)

    vectors: dict[str, Tensor] = {}
    u = torch.empty_like(sent.weights)
    with _Copies() as once:
        r = begin(algorithm, local, sent, memory, STEPS, u, lambda name: vectors.setdefault(name, torch.empty_like(u)))
    noise = torch.empty_like(u) if algorithm.perturbation.draws else None
    for number in range(STEPS):
        with _Copies() as copied, _Made() as made:
            look(r, gradient, number, noise)
            move(r, number)
        _refuse(algorithm, copied.draws)
        if how := copied.how or made.how:
            raise ValueError(
                f"{algorithm!r} sends a tensor from the host in every step ({how}), which a GPU would wait for; "
                "make it in `begin` or `prepare`, once for the round, or use a number in its place"
            )
    with once:
        after = finish(r, memory, sent, STEPS)[1]
    if not algorithm.perturbation.draws:  # whoever says that it draws is seeded before the first step
        _refuse(algorithm, once.draws)
    return after


def _refuse(algorithm: Algorithm, draws: str) -> None:
    if draws:
        raise ValueError(
            f"{algorithm!r} draws random numbers of its own ({draws}), which no seed repeats; set `draws = True` in "
            "the perturbation, and in steps take step.noise"
        )


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds an operation that makes a tensor of the device from tensors of the host, and one that draws."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.how = self.draws = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(out))
        # A single number beside tensors of the device goes with the call.
        if made and any(not leaf.is_meta and (leaf.ndim or not any(t.is_meta for t in given)) for leaf in given):
            self.how = str(func)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws = str(func)
        return out


class _Made(TorchFunctionMode):
    """Finds a tensor of the device that is made of Python's numbers, which no operation of the device shows."""

    def __init__(self) -> None:
        super().__init__()
        self.how = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor) and out.is_meta:
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.how = self.how if len(given) > (func is Tensor.new_tensor) else func.__name__
        return out
