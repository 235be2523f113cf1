"""Clients of a small model trained as one computation: the local loop of core/client.py, mapped over clients.

It pays where a step is too small to keep a core busy (benchmarks/stacked.py): a multilayer perceptron, not a
convolution on pictures. The results are those of the serial engine to rounding.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from fedlesam.core import seeds
from fedlesam.core.batches import Batches, batch_indices, size_of
from fedlesam.core.buffers import same_bits
from fedlesam.core.checks import NotFinite
from fedlesam.core.client import ClientRound, begin, finish, look, move
from fedlesam.core.messages import Broadcast, ClientResult, Memory
from fedlesam.core.slots import State
from fedlesam.engines.base import is_client_error
from fedlesam.engines.serial import SerialEngine

LARGEST = 64_000_000
"""Entries of the stacked weights at a time."""


CHANGES = "the stacked engine cannot train models that change buffers such as BatchNorm's; use the plain engine ({})"


class NotStackable(ValueError):
    """The model or the loss cannot be mapped over clients; no fault of a client."""


def check_stackable(workers: int, compile: bool) -> None:
    """A ValueError for settings that this engine would not keep to."""
    if workers > 1:
        raise ValueError(
            f"the stacked engine goes with one worker, got {workers}: the size of a stack decides the last bits of "
            "what its clients learn, and workers would make stacks of other sizes; use one worker, or the plain engine"
        )
    if compile:
        raise ValueError("compile does not go with the stacked engine, which does not compile; use the plain engine")


@dataclass
class Rows:
    """The rounds of several clients, a row each: `ClientRound` with stacked tensors."""

    shared: ClientRound
    """What all of them have in common: numbers, anchor, the server's state."""
    tensors: dict[str, Any]
    """By name, a row per client; `client_state` is a dict of them, empty where the steps do not use it."""
    states: list[State]
    """The client states at the start, which have the names that each client knows."""

    def row(self, i: int) -> ClientRound:
        """The round of client number i."""
        one = self.one(row_of(self.tensors, i))
        one.client_state = {name: one.client_state.get(name, start) for name, start in self.states[i].items()}
        return one

    def one(self, row: Mapping[str, Any]) -> ClientRound:
        """The round of the client whose row this is, inside a map over clients."""
        affine = self.shared.affine._replace(bias=row.get("bias"))
        return ClientRound(
            algorithm=self.shared.algorithm,
            local=self.shared.local,
            lr=self.shared.lr,
            anchor=self.shared.anchor,
            client_state=dict(row["client_state"]),
            server_state=self.shared.server_state,
            affine=affine,
            centre=row.get("e", self.shared.centre),
            u=row["u"],
            v=row.get("v", row["u"]),
            g=row["g"],
            ascent=row.get("ascent"),
            momentum=row.get("momentum"),
            e=row.get("e"),
            mapped=True,
        )


class StackedEngine(SerialEngine):
    """Stacks the active clients that have as many samples and epochs as each other; the rest train one by one."""

    def results(
        self, broadcast: Broadcast, share: Sequence[int], before_step: Callable[[], None]
    ) -> Iterator[ClientResult]:
        alike: dict[tuple[int, int], list[int]] = defaultdict(list)
        for client in share:
            epochs = self.local.epochs_of(self.seed, broadcast.round, client)
            alike[size_of(self.clients[client]), epochs].append(client)
        most = max(1, LARGEST // broadcast.weights.numel())
        for (size, epochs), clients in alike.items():
            for start in range(0, len(clients), most):
                group = clients[start : start + most]
                if len(group) == 1:
                    yield from super().results(broadcast, group, before_step)
                    continue
                try:
                    results = self.together(broadcast, group, size, epochs, before_step)
                except NotStackable:
                    raise
                except Exception as error:
                    if not (self.drop and is_client_error(error)):
                        raise
                    yield from super().results(broadcast, group, before_step)  # one by one, to find out who fails
                else:
                    yield from results

    def together(
        self, broadcast: Broadcast, group: list[int], size: int, epochs: int, before_step: Callable[[], None]
    ) -> list[ClientResult]:
        """The results of clients that have `size` samples and `epochs` each."""
        local, device = self.local, self.model.device
        memories = [self.store.get(client, Memory()).to(device) for client in group]
        batches = [Batches(self.clients[client], device) for client in group]
        rngs = [seeds.generator(self.seed, "batches", broadcast.round, client) for client in group]
        masks = [seeds.derive(self.seed, "step", broadcast.round, client) for client in group]
        rows = self._begin(broadcast, memories, masks)
        self.model.load_buffers(broadcast.buffers)
        held = self.model.state.tensors()
        step = self._step(rows)
        noise = torch.empty_like(rows.tensors["u"]) if self.algorithm.perturbation.draws else None
        losses: list[Tensor] = []
        orders = [batch_indices(size, local.batch_size, epochs, False, rng) for rng in rngs]
        for chosen in zip(*orders, strict=True):
            before_step()
            masks = [mask + 1 for mask in masks]
            pairs = [b.fetch(i, m) for b, i, m in zip(batches, chosen, masks, strict=True)]
            inputs = [
                x if local.augment is None else local.augment(x, rng) for (x, _), rng in zip(pairs, rngs, strict=True)
            ]
            x, y = torch.stack(inputs), torch.stack([y for _, y in pairs])
            if noise is not None:
                for row, mask in zip(noise, masks, strict=True):
                    seeds.reseed_torch(mask, device)
                    row.normal_()
            losses.append(step(rows.tensors, x, y, len(losses), noise))
            self.model.backward_passes += len(group) * self.algorithm.perturbation.passes
        self._check_buffers(broadcast, held)
        values = torch.stack(losses, dim=1).tolist()
        for client, own in zip(group, values, strict=True):
            wrong = next((number for number, value in enumerate(own) if not math.isfinite(value)), None)
            if wrong is not None:
                raise NotFinite(f"the loss of step {wrong} is not finite", broadcast.round, client)
        results = []
        for i, client in enumerate(group):
            result, after, perturbation, correction = finish(rows.row(i), memories[i], broadcast, len(losses))
            if not all(math.isfinite(end) for end in result.update.aminmax()):
                raise NotFinite("the update is not finite", broadcast.round, client)
            loss = sum(values[i]) / len(values[i])
            results.append(ClientResult(client, size, result, loss, perturbation, correction, broadcast.buffers, after))
        return results

    def _begin(self, broadcast: Broadcast, memories: list[Memory], masks: list[int]) -> Rows:
        """Start every client, then stack what they start with."""
        rounds, anchor = [], broadcast.weights
        for memory, mask in zip(memories, masks, strict=True):
            seeds.reseed_torch(mask, self.model.device)
            empty = torch.empty_like(anchor)
            rounds.append(
                begin(self.algorithm, self.local, broadcast, memory, empty, lambda _: torch.empty_like(anchor))
            )
        first = rounds[0]
        tensors: dict[str, Any] = {}
        tensors["u"] = torch.stack([r.u for r in rounds])
        tensors["g"] = torch.zeros_like(tensors["u"])
        tensors["client_state"] = stacked_states([r.client_state for r in rounds], anchor) if first.ascends else {}
        if first.ascends:
            tensors["v"] = tensors["u"].clone()
            tensors["ascent"] = torch.zeros_like(tensors["u"])
        if first.momentum is not None:
            tensors["momentum"] = torch.zeros_like(tensors["u"])
        if any(r.affine.bias is not None for r in rounds):
            tensors["bias"] = stack_or_zero([r.affine.bias for r in rounds], anchor)
        if any(r.e is not None for r in rounds):
            tensors["e"] = stack_or_zero([r.e for r in rounds], anchor)
        return Rows(first, tensors, [r.client_state for r in rounds])

    def _step(self, rows: Rows) -> Callable[..., Tensor]:
        """One step of all clients: their losses, with the rows changed in place."""
        model, names, shapes, sizes = self.model, self.model.names, self.model.shapes, self.model.sizes
        model.module.train()

        def loss_at(flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
            pieces = torch.split(flat, sizes)
            weights = {name: p.view(shape) for name, p, shape in zip(names, pieces, shapes, strict=True)}
            with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
                output = functional_call(model.module, weights, (x,))
            return self.local.loss(output.float() if model.bf16 else output, y)

        def one(row: dict[str, Any], x: Tensor, y: Tensor, number: int, noise: Tensor | None) -> Tensor:
            def gradient(at: Tensor, out: Tensor, *, final: bool) -> Tensor:
                gradient_there, loss = grad_and_value(loss_at)(at, x, y)
                out.copy_(gradient_there)
                return torch.as_tensor(loss)

            r = rows.one(row)
            loss = look(r, gradient, number, noise)
            move(r)
            return loss

        def step(tensors: dict[str, Any], x: Tensor, y: Tensor, number: int, noise: Tensor | None) -> Tensor:
            noise_dim = None if noise is None else 0
            try:
                losses: Tensor = vmap(one, (0, 0, 0, None, noise_dim), randomness="error")(tensors, x, y, number, noise)
            except RuntimeError as error:
                raise NotStackable(
                    f"the stacked engine cannot train this model or loss ({str(error).splitlines()[0]}); "
                    "use the plain engine"
                ) from error
            return losses

        return step

    def _check_buffers(self, broadcast: Broadcast, held: dict[str, Tensor]) -> None:
        """One module stands for all clients of a group, so they cannot differ in what it keeps."""
        replaced = self.model.state.replaced(held)
        if replaced:
            raise NotStackable(CHANGES.format(", ".join(replaced)))
        self.model.state.check()
        for name, tensor in self.model.buffers().items():
            if not same_bits(tensor, broadcast.buffers[name]):
                raise NotStackable(CHANGES.format(name))


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
