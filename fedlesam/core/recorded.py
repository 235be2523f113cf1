"""A client's round in tensors that never move, and its steps recorded whole (graphs.py).

A step is one replay, a step of two passes is two. The first replay of two has the pass at v and the ascent, the other
the pass at v + e, the clipping, the correction and the descent. What differs between clients, rounds and steps is
copied: vectors once a client, learning rate and step number as tensors of one entry.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fedlesam.core.batches import Batch
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.gradient import BatchGradient
from fedlesam.core.graphs import Graphs
from fedlesam.core.slots import AffineStep, State
from fedlesam.core.step import ClientRound, Gradient, climb, differentiate, move

Part = Callable[[Gradient], Tensor]
"""A stretch of a step with one pass; it returns a loss."""


def held_round(model: FlatModel, r: ClientRound) -> ClientRound:
    """A round as it begins, with copies of all that is not the model's, in the order of the model's vector.

    Args:
        model: holds them.
        r: the round in the plain order; its u and v are where it starts.
    """
    (gain, pull, bias), hold, centre = r.affine, model.hold, model.hold("centre", r.centre)
    if model.order is not None:
        model.order.inward(r.u, model.weights)
    return replace(
        r,
        u=model.weights,
        v=model.weights if r.v is r.u else r.v.copy_(model.weights),
        anchor=hold("anchor", r.anchor),
        client_state=_held(hold, "client", r.client_state) if r.ascends else {},  # else no step looks at it
        server_state=_held(hold, "server", r.server_state) if r.ascends or r.algorithm.perturbation.teaches else {},
        affine=AffineStep(
            hold("gain", gain) if isinstance(gain, Tensor) else gain, pull, None if bias is None else hold("bias", bias)
        ),
        centre=centre,
        e=None if r.e is None else centre,
    )


def given_back(model: FlatModel, before: ClientRound, after: ClientRound) -> ClientRound:
    """A round after its last step, in the plain order, with tensors that the next client does not overwrite.

    Args:
        model: holds it.
        before: what `held_round` was given.
        after: what it returned.
    """

    def back(tensor: Tensor) -> Tensor:
        into = torch.empty_like(tensor)
        return model.plain(tensor, into) if tensor.shape == model.weights.shape else into.copy_(tensor)

    states = {name: back(state) for name, state in after.client_state.items()} if after.ascends else before.client_state
    return replace(before, v=model.plain(after.v, model.scratch("plain")), client_state=states)


class RecordedRound:
    """Makes the steps of one client's round, by replays as soon as they are recorded.

    Args:
        graphs: of the model.
        r: the round, held.
        gradient: makes the passes.
        noise: the model's vector of random numbers, for a rule that draws.
    """

    def __init__(self, graphs: Graphs, r: ClientRound, gradient: BatchGradient, noise: Tensor | None) -> None:
        self.graphs, self.gradient, self.noise = graphs, gradient, noise
        self.r = replace(r, lr=graphs.number("lr", r.lr), steps=graphs.number("steps", r.steps))
        (gain, pull, bias), local = r.affine, r.local
        rules = r.algorithm.perturbation, r.algorithm.correction, r.algorithm.lr_floor
        graphs.keep_only((*rules, local.clip, local.clip_scope, local.weight_decay, local.momentum, local.optimizer))
        forms = sorted((name, tensor.shape) for name, tensor in r.client_state.items())
        gains = None if isinstance(gain, Tensor) else gain
        self.form = gains, pull, bias is None, r.centre.ndim, tuple(forms)

    def step(self, number: int) -> Tensor:
        """Make one step; its loss, which is elsewhere after the next step.

        Args:
            number: of the step, from 0.
        """
        rule, at = self.r.algorithm.perturbation, self.graphs.number("number", number)

        def ascent(gradient: Gradient) -> Tensor:
            climb(self.r, gradient, at, self.noise)
            return self.r.u

        def descent(gradient: Gradient) -> Tensor:
            if rule.gradient != "current":
                climb(self.r, gradient, at, self.noise)
            loss = differentiate(self.r, gradient)
            move(self.r, at)
            return loss

        if rule.gradient == "current":
            self._part("ascent", ascent)
        return self._part("descent", descent)

    def _part(self, name: str, part: Part) -> Tensor:
        if name == self.r.algorithm.perturbation.teaches:
            return part(self.gradient)  # it seeds between the teacher's pass and its own
        model = self.gradient.model
        passes = model.backward_passes

        def work(batch: Batch) -> Tensor:
            before = dict(self.r.client_state)
            found = part(functools.partial(self.gradient.once, batch))
            if list(map(id, before.values())) != list(map(id, self.r.client_state.values())):
                self.graphs.refuse("the rule replaces the tensors of its state")
            return found

        found = self.graphs.run((name, *self.form), work, self.gradient.batch[0], self.gradient.seed)
        model.backward_passes = passes + 1
        return found


def _held(hold: Callable[[str, Tensor], Tensor], whose: str, state: State) -> State:
    return {name: hold(f"{whose} {name}", tensor) for name, tensor in state.items()}
