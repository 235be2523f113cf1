"""Clients of a small model trained as one computation: their weights are stacked, their gradients taken by vmap.

The same mathematics as client.py and descent.py, a row per client, to rounding. It pays where a step is too small to
keep a core busy (benchmarks/stacked.py): a multilayer perceptron, not a convolution on pictures.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from fedlesam.core import seeds
from fedlesam.core.batches import Batches, batch_indices, size_of
from fedlesam.core.buffers import same_bits
from fedlesam.core.checks import NotFinite
from fedlesam.core.messages import Answer, Broadcast, Memory
from fedlesam.core.vectors import CLIP_EPS
from fedlesam.engines.serial import SerialEngine, is_the_clients
from fedlesam.rules.base import LocalResult

LARGEST = 64_000_000
"""Entries of the stacked weights at a time."""


CHANGES = "the stacked engine cannot train models that change buffers such as BatchNorm's; use the plain engine ({})"


class NotStackable(ValueError):
    """No fault of a client."""


def check_stackable(workers: int, compile: bool) -> None:
    """A ValueError for settings that this engine would not keep to."""
    if workers > 1:
        raise ValueError(
            f"the stacked engine goes with one worker, got {workers}: the size of a stack decides the last bits of "
            "what its clients learn, and workers would make stacks of other sizes; use one worker, or the plain engine"
        )
    if compile:
        raise ValueError("compile does not go with the stacked engine, which does not compile; use the plain engine")


class StackedEngine(SerialEngine):
    """Stacks the active clients that have as many samples and epochs as each other; the rest train one by one."""

    def answers(self, sent: Broadcast, chosen: Sequence[int], before_step: Callable[[], None]) -> Iterator[Answer]:
        alike: dict[tuple[int, int], list[int]] = defaultdict(list)
        for client in chosen:
            epochs = self.local.epochs_of(self.seed, sent.round, client)
            alike[size_of(self.clients[client]), epochs].append(client)
        most = max(1, LARGEST // sent.weights.numel())
        for (size, epochs), clients in alike.items():
            for start in range(0, len(clients), most):
                group = clients[start : start + most]
                if len(group) == 1:
                    yield from super().answers(sent, group, before_step)
                    continue
                try:
                    answers = self.together(sent, group, size, epochs, before_step)
                except NotStackable:
                    raise
                except Exception as error:
                    if not (self.drop and is_the_clients(error)):
                        raise
                    yield from super().answers(sent, group, before_step)  # one by one: who fails, and who does not
                else:
                    yield from answers

    def together(
        self, sent: Broadcast, group: list[int], size: int, epochs: int, before_step: Callable[[], None]
    ) -> list[Answer]:
        self.training = group[0]
        rule, correction, local = self.algorithm.perturbation, self.algorithm.correction, self.local
        anchor, device, lr = sent.weights, self.model.device, local.lr_at(sent.round, self.algorithm)
        memories = [self.store.get(client, Memory()).to(device) for client in group]
        masks = [seeds.derive(self.seed, "step", sent.round, client) for client in group]
        draws = [seeds.generator(self.seed, "batches", sent.round, client) for client in group]
        batches = [Batches(self.clients[client], device) for client in group]
        mine, turns, constants = [], [], []
        for memory, mask in zip(memories, masks, strict=True):
            seeds.reseed_torch(mask, device)
            mine.append(rule.begin(anchor, memory.perturbation))
            turns.append(correction.prepare(anchor, memory.correction, sent.correction))
            constants.append(rule.constant(anchor, mine[-1], sent.perturbation) if rule.gradient == "unused" else None)

        gain, rate = turns[0].gain, turns[0].pull + local.weight_decay
        bias = None if turns[0].bias is None else torch.stack([t.bias for t in turns if t.bias is not None])
        inner = local.clip_scope == "corrected"
        centre = anchor.new_zeros(())
        if any(e is not None for e in constants):
            centre = torch.stack([torch.zeros_like(anchor) if e is None else e for e in constants])
        u = (anchor + centre).expand(len(group), -1).clone()
        start, v = u.clone(), u.clone() if rule.gradient != "unused" else u
        previous, heavy = torch.zeros_like(u), torch.zeros_like(u) if local.momentum else None
        self.model.load_buffers(sent.buffers)
        held = self.model.state.tensors()
        gradient = self._gradient()
        losses, steps = torch.zeros(len(group), dtype=torch.float64), 0
        orders = [batch_indices(size, local.batch_size, epochs, False, draw) for draw in draws]
        for chosen in zip(*orders, strict=True):
            masks = [mask + 1 for mask in masks]
            pairs = [b.fetch(i, m) for b, i, m in zip(batches, chosen, masks, strict=True)]
            inputs = [
                x if local.augment is None else local.augment(x, d) for (x, _), d in zip(pairs, draws, strict=True)
            ]
            x, y = torch.stack(inputs), torch.stack([y for _, y in pairs])
            if rule.gradient == "here":
                previous = gradient(u, x, y)[0]
            if rule.gradient != "unused":
                for i, mask in enumerate(masks):
                    seeds.reseed_torch(mask, device)
                    torch.add(v[i], rule.ascend(previous[i], v[i], mine[i], sent.perturbation), out=u[i])
            g, loss = gradient(u, x, y)
            before_step()
            self._check(loss, f"the loss of step {steps} is not finite", sent.round, group)
            if rule.gradient == "previous":
                previous.copy_(g)
            if inner:
                g.mul_(gain)
                if bias is not None:
                    g.add_(bias)
            scale = torch.full_like(loss, 1.0 if inner else gain)
            if local.clip is not None:
                scale *= (local.clip / (g.norm(dim=1) + CLIP_EPS)).clamp_(max=1.0)
            g.mul_(scale[:, None]).add_(v - centre, alpha=rate)
            if bias is not None and not inner:
                g.add_(bias)
            if heavy is not None:
                g = heavy.mul_(local.momentum).add_(g)
            v.sub_(g, alpha=lr)
            if v is not u:
                u.copy_(v)
            losses += loss.double().cpu()
            steps += 1

        self._check_buffers(sent, held)
        answers = []
        for i, client in enumerate(group):
            memory = memories[i]
            result = LocalResult(v[i] - start[i], steps, lr)
            if not all(math.isfinite(end) for end in result.update.aminmax()):
                raise NotFinite("the update is not finite", sent.round, client)
            after = Memory(
                rule.remember(anchor, mine[i]), correction.remember(memory.correction, sent.correction, result)
            )
            answers.append(
                Answer(
                    client=client,
                    examples=size,
                    result=result,
                    loss=float(losses[i]) / steps,
                    perturbation=rule.upload(mine[i]),
                    correction=correction.upload(memory.correction, after.correction),
                    buffers=sent.buffers,
                    memory=after,
                )
            )
        return answers

    def _gradient(self) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Gradients (clients x entries) and losses of stacked weights, each on its own batch."""
        model, names = self.model, self.model.names
        model.module.train()

        def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
                output = functional_call(model.module, weights, (x,))
            return self.local.loss(output.float() if model.bf16 else output, y)

        each = vmap(grad_and_value(loss), randomness="error")

        def gradient(u: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            pieces = torch.split(u, [shape.numel() for shape in model.shapes], dim=1)
            weights = {k: p.view(len(u), *s) for k, p, s in zip(names, pieces, model.shapes, strict=True)}
            try:
                g, losses = each(weights, x, y)
            except RuntimeError as error:
                raise NotStackable(
                    f"the stacked engine cannot train this model or loss ({str(error).splitlines()[0]}); "
                    "use the plain engine"
                ) from error
            model.backward_passes += len(u)
            return torch.cat([g[name].flatten(1) for name in names], dim=1), losses

        return gradient

    def _check_buffers(self, sent: Broadcast, held: dict[str, Tensor]) -> None:
        """One module stands for all clients of a group, so they cannot differ in what it keeps."""
        replaced = self.model.state.replaced(held)
        if replaced:
            raise NotStackable(CHANGES.format(", ".join(replaced)))
        self.model.state.check()
        for name, tensor in self.model.buffers().items():
            if not same_bits(tensor, sent.buffers[name]):
                raise NotStackable(CHANGES.format(name))

    @staticmethod
    def _check(losses: Tensor, what: str, round: int, group: list[int]) -> None:
        wrong = (~losses.isfinite()).nonzero().flatten().tolist()
        if wrong:
            raise NotFinite(what, round, group[wrong[0]])
