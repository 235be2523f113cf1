"""Whether rules compute on the device alone: a client's round on the meta device, whose tensors cannot be read."""

import torch
from torch import Tensor

from fedlesam.core.local import LocalTraining
from fedlesam.core.messages import Memory
from fedlesam.core.server import ServerState
from fedlesam.core.slots import Algorithm, TensorSpec
from fedlesam.core.step import begin, finish, look, move

STEPS = 3


def check_on_device(algorithm: Algorithm) -> None:
    """A ValueError if a rule reads a number of a vector on the host in a client's round, as `float(norm)` does.

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

    def gradient(at: Tensor, out: Tensor, *, final: bool, lesson: object = None) -> Tensor:
        out.copy_(at)
        return at.sum()

    vectors: dict[str, Tensor] = {}
    u = torch.empty_like(sent.weights)
    r = begin(algorithm, local, sent, memory, STEPS, u, lambda name: vectors.setdefault(name, torch.empty_like(u)))
    noise = torch.empty_like(u) if algorithm.perturbation.draws else None
    for number in range(STEPS):
        look(r, gradient, number, noise)
        move(r, number)
    return finish(r, memory, sent, STEPS)[1]
