"""Clients of a small model trained as one computation: the local loop of core/client.py, mapped over clients.

It pays where a step is too small to keep a core busy (benchmarks/stacked.py): a multilayer perceptron, not a
convolution on pictures. The results are those of the serial engine to rounding.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlesam.core import seeds
from fedlesam.core.batches import Batches, batch_indices, size_of
from fedlesam.core.buffers import same_bits
from fedlesam.core.checks import NotFinite
from fedlesam.core.client import finish
from fedlesam.core.messages import Broadcast, ClientResult, Memory
from fedlesam.engines._mapped import MappedStep, begin_rows
from fedlesam.engines._mapped import NotStackable as NotStackable
from fedlesam.engines.base import is_client_error
from fedlesam.engines.serial import SerialEngine

LARGEST = 64_000_000
"""Entries of the stacked weights at a time."""


CHANGES = "the stacked engine cannot train models that change buffers such as BatchNorm's; use the plain engine ({})"


def check_stackable(workers: int) -> None:
    """A ValueError for settings that this engine would not keep to."""
    if workers > 1:
        raise ValueError(
            f"the stacked engine goes with one worker, got {workers}: the size of a stack decides the last bits of "
            "what its clients learn, and workers would make stacks of other sizes; use one worker, or the plain engine"
        )


@dataclass
class StackedEngine(SerialEngine):
    """Stacks the active clients that have as many samples and epochs as each other; the rest train one by one."""

    compile_step: bool = False
    """Compile the step of all clients as one function."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.step = MappedStep(self.model, self.local, self.compile_step)

    def results(
        self, broadcast: Broadcast, share: Sequence[int], before_step: Callable[[], None]
    ) -> Iterator[list[ClientResult]]:
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
                    if not is_client_error(error):
                        raise
                    yield from super().results(broadcast, group, before_step)  # one by one: who fails, and why
                else:
                    yield results

    def together(
        self, broadcast: Broadcast, group: list[int], size: int, epochs: int, before_step: Callable[[], None]
    ) -> list[ClientResult]:
        """The results of clients that have `size` samples and `epochs` each."""
        memories = [self.store.get(client, Memory()).to(self.model.device) for client in group]
        masks = [seeds.derive(self.seed, "step", broadcast.round, client) for client in group]
        rows = begin_rows(self.algorithm, self.local, broadcast, memories, masks)
        self.model.load_buffers(broadcast.buffers)
        held = self.model.state.tensors()
        losses: list[Tensor] = []
        for x, y, noise in self._batches(broadcast.round, group, size, epochs, masks):
            before_step()
            losses.append(self.step(rows, x, y, len(losses), noise))
            self.model.backward_passes += len(group) * self.algorithm.perturbation.passes
        self._check_buffers(broadcast, held)
        values = torch.stack(losses, dim=1).tolist()
        finite = (rows.own.get("v", rows.own["u"])).isfinite().all(1).tolist()
        results = []
        for i, (client, own) in enumerate(zip(group, values, strict=True)):
            wrong = next((number for number, value in enumerate(own) if not math.isfinite(value)), None)
            if wrong is not None:
                raise NotFinite(f"the loss of step {wrong} is not finite", broadcast.round, client)
            if not finite[i]:
                raise NotFinite("the update is not finite", broadcast.round, client)
            result, after, perturbation, correction = finish(rows.row(i), memories[i], broadcast, len(losses))
            loss = sum(own) / len(own)
            results.append(ClientResult(client, size, result, loss, perturbation, correction, broadcast.buffers, after))
        return results

    def _batches(
        self, round: int, group: list[int], size: int, epochs: int, masks: list[int]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Inputs and targets of each step, a row per client, and the random numbers of a rule that draws."""
        local, device = self.local, self.model.device
        batches = [Batches(self.clients[client], device) for client in group]
        rngs = [seeds.generator(self.seed, "batches", round, client) for client in group]
        orders = [batch_indices(size, local.batch_size, epochs, False, rng) for rng in rngs]
        whole = stacked_data(batches) if local.augment is None else None
        rows = torch.arange(len(group))[:, None]
        draws = self.algorithm.perturbation.draws
        noise = torch.empty(len(group), self.model.weights.numel(), dtype=self.model.weights.dtype) if draws else None
        for number, chosen in enumerate(zip(*orders, strict=True), 1):
            if whole is not None:
                picked = (rows, torch.stack(chosen)) if isinstance(chosen[0], Tensor) else slice(None)
                x, y = whole[0][picked], whole[1][picked]
            else:
                pairs = [b.fetch(i, m + number) for b, i, m in zip(batches, chosen, masks, strict=True)]
                augment = local.augment or (lambda x, _: x)
                x = torch.stack([augment(x, rng) for (x, _), rng in zip(pairs, rngs, strict=True)])
                y = torch.stack([y for _, y in pairs])
            if noise is not None:
                for row, mask in zip(noise, masks, strict=True):
                    seeds.reseed_torch(mask + number, device)
                    row.normal_()
            yield x, y, noise

    def _check_buffers(self, broadcast: Broadcast, held: dict[str, Tensor]) -> None:
        """One module stands for all clients of a group, so they cannot differ in what it keeps."""
        replaced = self.model.state.replaced(held)
        if replaced:
            raise NotStackable(CHANGES.format(", ".join(replaced)))
        self.model.state.check()
        for name, tensor in self.model.buffers().items():
            if not same_bits(tensor, broadcast.buffers[name]):
                raise NotStackable(CHANGES.format(name))


def stacked_data(batches: list[Batches]) -> tuple[Tensor, Tensor] | None:
    """All samples of the clients, a row per client, where they are tensors of one shape and not too large."""
    pairs = [b.tensors for b in batches if b.tensors is not None]
    if len(pairs) < len(batches) or len({(x.shape, y.shape, x.dtype, y.dtype) for x, y in pairs}) > 1:
        return None
    if len(pairs) * (pairs[0][0].numel() + pairs[0][1].numel()) > LARGEST:
        return None
    return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])
