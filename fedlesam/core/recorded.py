"""A client's round whose steps are recorded whole (graphs.py): a step is one replay, a step of two passes is two.

The first replay of two has the pass at v and the ascent, the other the pass at v + e, the clipping, the correction and
the descent. What differs between clients, rounds and steps is copied into tensors that never move: vectors once a
client, learning rate and step number as numbers of one entry.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from fedlesam.core.batches import Batch
from fedlesam.core.client import ClientRound, Gradient, climb, differentiate, move
from fedlesam.core.gradient import BatchGradient
from fedlesam.core.graphs import Graphs
from fedlesam.core.slots import AffineStep, State

Part = Callable[[Gradient], Tensor]
"""A stretch of a step with one pass; it returns a loss."""


class RecordedRound:
    """Makes the steps of one client's round, by replays as soon as they are recorded.

    Args:
        graphs: of the model.
        r: the round as it begins; its own vectors are the model's, the others are copied.
        gradient: makes the passes.
        noise: the model's vector of random numbers, for a rule that draws.
    """

    def __init__(self, graphs: Graphs, r: ClientRound, gradient: BatchGradient, noise: Tensor | None) -> None:
        self.graphs, self.given, self.gradient, self.noise = graphs, r, gradient, noise
        (gain, pull, bias), hold, local = r.affine, graphs.hold, r.local
        asked = r.algorithm.perturbation.gradient != "unused"  # else no step looks at the states
        self.states = _held(hold, "client", r.client_state) if asked else {}
        centre = hold("centre", r.centre)
        self.held = replace(
            r,
            lr=graphs.number("lr", r.lr),
            steps=graphs.number("steps", r.steps),
            anchor=hold("anchor", r.anchor),
            client_state=dict(self.states),
            server_state=_held(hold, "server", r.server_state) if asked else {},
            affine=AffineStep(
                hold("gain", gain) if isinstance(gain, Tensor) else gain,
                pull,
                None if bias is None else hold("bias", bias),
            ),
            centre=centre,
            e=None if r.e is None else centre,
        )
        rules = r.algorithm.perturbation, r.algorithm.correction, r.algorithm.lr_floor
        graphs.keep_only((*rules, local.clip, local.clip_scope, local.weight_decay, local.momentum, local.optimizer))
        forms = sorted((name, tensor.shape) for name, tensor in self.states.items())
        gains = None if isinstance(gain, Tensor) else gain
        self.form = gains, pull, bias is None, centre.ndim, tuple(forms)

    def step(self, number: int) -> Tensor:
        """Make one step; its loss, which is elsewhere after the next step.

        Args:
            number: of the step, from 0.
        """
        rule, at = self.held.algorithm.perturbation, self.graphs.number("number", number)

        def ascent(gradient: Gradient) -> Tensor:
            climb(self.held, gradient, at, self.noise)
            return self.held.u

        def descent(gradient: Gradient) -> Tensor:
            if rule.gradient != "current":
                climb(self.held, gradient, at, self.noise)
            loss = differentiate(self.held, gradient)
            move(self.held, at)
            return loss

        if rule.gradient == "current":
            self._part("ascent", ascent)
        return self._part("descent", descent)

    def end(self) -> ClientRound:
        """The round after its last step, with tensors that the next client does not overwrite."""
        return replace(self.given, client_state={name: state.clone() for name, state in self.states.items()})

    def _part(self, name: str, part: Part) -> Tensor:
        if name == self.held.algorithm.perturbation.teaches:
            return part(self.gradient)  # it seeds between the teacher's pass and its own
        model = self.gradient.model
        passes = model.backward_passes

        def work(batch: Batch) -> Tensor:
            found = part(functools.partial(self.gradient.once, batch))
            if self.held.client_state.keys() != self.states.keys() or any(
                self.held.client_state[key] is not state for key, state in self.states.items()
            ):
                self.graphs.refuse("the rule replaces the tensors of its state")
                self.states = dict(self.held.client_state)
            return found

        self.gradient.seed()
        found = self.graphs.run((name, *self.form), work, self.gradient.batch[0])
        model.backward_passes = passes + 1
        return found


def _held(hold: Callable[[str, Tensor], Tensor], whose: str, state: State) -> State:
    return {name: hold(f"{whose} {name}", tensor) for name, tensor in state.items()}
