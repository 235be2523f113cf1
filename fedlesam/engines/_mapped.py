"""The local loop of core/client.py mapped over many clients: their vectors are rows, a step is one computation."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from fedlesam.core import seeds
from fedlesam.core.client import ClientRound, begin, look, move
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.local import LocalTraining
from fedlesam.core.messages import Broadcast, Memory
from fedlesam.core.slots import AffineStep, Algorithm, State

log = logging.getLogger("fedlesam")


class NotStackable(ValueError):
    """The model or the loss cannot be mapped over clients; no fault of a client."""


class Fixed(NamedTuple):
    """What is the same for all clients and, as a rule, for all rounds: a compiled step is made for it."""

    algorithm: Algorithm
    local: LocalTraining
    affine: AffineStep
    """Without its bias, which is each client's own."""


@dataclass
class Rows:
    """The rounds of several clients, a row each."""

    fixed: Fixed
    lr: float
    common: dict[str, Any]
    """Tensors that all clients share: anchor, learning rate, the server's state."""
    own: dict[str, Any]
    """Tensors by name, a row per client; `client_state` is a dict of them, empty where the steps do not use it."""
    states: list[State]
    """The client states at the start, which have the names that each client knows."""

    def row(self, i: int) -> ClientRound:
        """The round of client number i; its state is a copy, for a row that is kept would keep all of them."""
        one = round_of(self.fixed, self.common, row_of(self.own, i))
        one.lr = self.lr
        own = one.client_state
        one.client_state = {n: own[n].clone() if n in own else start for n, start in self.states[i].items()}
        return one


def round_of(fixed: Fixed, common: Mapping[str, Any], own: Mapping[str, Any]) -> ClientRound:
    """One client's round, from the tensors that it shares and its own row."""
    return ClientRound(
        algorithm=fixed.algorithm,
        local=fixed.local,
        lr=common["lr"],
        anchor=common["anchor"],
        client_state=dict(own["client_state"]),
        server_state=common["server_state"],
        affine=fixed.affine._replace(bias=own.get("bias")),
        centre=own.get("e", common["zero"]),
        u=own["u"],
        v=own.get("v", own["u"]),
        g=own["g"],
        ascent=own.get("ascent"),
        momentum=own.get("momentum"),
        e=own.get("e"),
        mapped=True,
    )


def begin_rows(
    algorithm: Algorithm, local: LocalTraining, broadcast: Broadcast, memories: Sequence[Memory], masks: Sequence[int]
) -> Rows:
    """Start every client, then stack what they start with.

    Args:
        algorithm: the method.
        local: how clients train.
        broadcast: what the server sent.
        memories: what each client kept.
        masks: each client's seed, for rules that draw.
    """
    anchor = broadcast.weights
    scratch = torch.empty_like(anchor)
    us = torch.empty(len(memories), anchor.numel(), dtype=anchor.dtype, device=anchor.device)
    rounds = []
    for u, memory, mask in zip(us, memories, masks, strict=True):
        if algorithm.perturbation.draws:
            seeds.reseed_torch(mask, anchor.device)
        rounds.append(begin(algorithm, local, broadcast, memory, u, lambda _: scratch))
    first = rounds[0]
    own: dict[str, Any] = {"u": us, "g": torch.zeros_like(us), "client_state": {}}
    if first.ascends:
        own["client_state"] = stacked_states([r.client_state for r in rounds], anchor)
        own |= {"v": us.clone(), "ascent": torch.zeros_like(us)}
    if first.momentum is not None:
        own["momentum"] = torch.zeros_like(us)
    if any(r.affine.bias is not None for r in rounds):
        own["bias"] = stack_or_zero([r.affine.bias for r in rounds], anchor)
    if any(r.e is not None for r in rounds):
        own["e"] = stack_or_zero([r.e for r in rounds], anchor)
    common = {
        "anchor": anchor,
        "lr": anchor.new_tensor(float(first.lr)),
        "zero": anchor.new_zeros(()),
        "server_state": dict(broadcast.perturbation),
    }
    fixed = Fixed(algorithm, local, first.affine._replace(bias=None))
    return Rows(fixed, float(first.lr), common, own, [r.client_state for r in rounds])


class MappedStep:
    """One step of all clients as one function of their rows, which it changes in place.

    Compiled, the whole step (ascent, gradients, clipping, descent) is one program without a loop over clients. Where
    there is no compiler it runs as it is, and a warning says so.
    """

    def __init__(self, model: FlatModel, local: LocalTraining, compile: bool) -> None:
        self.model, self.local = model, local
        self.names, self.shapes, self.sizes = model.names, model.shapes, model.sizes
        self.fixed: Fixed | None = None
        self._fast: Callable[..., Tensor] | None = torch.compile(self._step) if compile else None

    def __call__(self, rows: Rows, x: Tensor, y: Tensor, number: int, noise: Tensor | None) -> Tensor:
        """The losses of the clients on their batches.

        Args:
            rows: their rounds.
            x: inputs, a row per client.
            y: targets, a row per client.
            number: of the step.
            noise: random numbers for a rule that draws.
        """
        self.model.module.train()
        if self.fixed != rows.fixed:
            self.fixed = rows.fixed
        arguments = (rows.common, rows.own, x, y, torch.tensor(number), noise)
        if self._fast is not None:
            try:
                return self._fast(*arguments)
            except Exception as error:
                if not _is_compilers(error):
                    raise self._refusal(error) from error
                log.warning("the step cannot be compiled here, it runs uncompiled: %s", str(error).splitlines()[0])
                self._fast = None
        try:
            return self._step(*arguments)
        except RuntimeError as error:
            raise self._refusal(error) from error

    def _refusal(self, error: Exception) -> NotStackable:
        return NotStackable(
            f"the stacked engine cannot train this model or loss ({str(error).splitlines()[0]}); use the plain engine"
        )

    def _step(
        self, common: dict[str, Any], own: dict[str, Any], x: Tensor, y: Tensor, number: Tensor, noise: Tensor | None
    ) -> Tensor:
        fixed = self.fixed
        assert fixed is not None

        def one(row: dict[str, Any], x: Tensor, y: Tensor, noise: Tensor | None) -> Tensor:
            def gradient(at: Tensor, out: Tensor, *, final: bool) -> Tensor:
                slope, loss = grad_and_value(self._loss)(at, x, y)
                out.copy_(slope)
                return torch.as_tensor(loss)

            r = round_of(fixed, common, row)
            loss = look(r, gradient, number, noise)
            move(r)
            return loss

        losses: Tensor = vmap(one, (0, 0, 0, None if noise is None else 0), randomness="error")(own, x, y, noise)
        return losses

    def _loss(self, flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
        pieces = torch.split(flat, self.sizes)
        weights = {name: p.view(shape) for name, p, shape in zip(self.names, pieces, self.shapes, strict=True)}
        with torch.autocast(flat.device.type, torch.bfloat16, enabled=self.model.bf16):
            output = functional_call(self.model.module, weights, (x,))
        return self.local.loss(output.float() if self.model.bf16 else output, y)


def _is_compilers(error: Exception) -> bool:
    """Whether the compiler failed, not the model."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def row_of(tensors: Mapping[str, Any], i: int) -> dict[str, Any]:
    """The tensors of one client."""
    return {name: row_of(value, i) if isinstance(value, dict) else value[i] for name, value in tensors.items()}


def stack_or_zero(vectors: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """A row per vector; zeros where there is none."""
    return torch.stack([torch.zeros_like(like) if vector is None else vector for vector in vectors])


def stacked_states(states: Sequence[State], like: Tensor) -> dict[str, Tensor]:
    """A row per client of every vector that one of them has."""
    names = dict.fromkeys(name for state in states for name in state)
    return {name: stack_or_zero([state.get(name) for state in states], like) for name in names}
