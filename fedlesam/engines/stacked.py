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
from fedlesam.core.batches import Batches, size_of
from fedlesam.core.buffers import same_bits
from fedlesam.core.messages import Broadcast, ClientResult, Memory
from fedlesam.core.state import flatten
from fedlesam.core.tree import leaves, named_tensors
from fedlesam.core.vectors import rows_of
from fedlesam.engines._feed import Fetched, Gathered, Member, can_fill_up, draw_noise
from fedlesam.engines._mapped import MappedStep
from fedlesam.engines._mapped import NotStackable as NotStackable
from fedlesam.engines._rows import Rows, Run, Tree, begin_rows, finish_rows, map_tree
from fedlesam.engines.base import is_client_error
from fedlesam.engines.serial import SerialEngine

LARGEST = 64_000_000
"""Entries of the stacked weights at a time."""
CACHED, LEAST = 1 << 18, 8
"""The same for a compiled step, about what a core's cache holds; but not fewer clients than this."""


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
    """Stacks the active clients; one that cannot be, or whose numbers are not finite, trains by itself.

    Clients with other numbers of samples share a stack where the loss can ignore what fills their batches up.
    """

    compile_step: bool = False
    """Compile the step of all clients as one function."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.step = MappedStep(self.model, self.task, self.compile_step)
        self.widest = 0
        """The clients of the largest stack: smaller ones are filled up to it, for a compiled step has one shape."""

    def results(
        self, broadcast: Broadcast, share: Sequence[int], before_step: Callable[[], None]
    ) -> Iterator[list[ClientResult]]:
        alike: dict[tuple[object, ...], list[Member]] = defaultdict(list)
        alone: list[int] = []
        for client in share:
            self.training = client
            try:
                member = self._member(broadcast.round, client)
            except Exception as error:
                if not is_client_error(error):
                    raise
                alone.append(client)  # the plain loop says why
            else:
                alike[self._kind(member)].append(member)
        for members in alike.values():
            members.sort(key=lambda m: m.steps(self.local.batch_size), reverse=True)
            for group in self._stacks(members, broadcast.weights.numel()):
                if len(group) == 1:
                    alone.append(group[0].client)
                    continue
                try:
                    results = self.together(broadcast, group, before_step)
                except NotStackable:
                    raise
                except Exception as error:
                    if not is_client_error(error):
                        raise
                    results = []
                answered = {result.client for result in results}
                alone += [member.client for member in group if member.client not in answered]
                if results:
                    yield results
        yield from super().results(broadcast, alone, before_step)  # one by one: who fails, and why

    def _stacks(self, members: list[Member], weights: int) -> Iterator[list[Member]]:
        """Stacks of nearly equal size: a compiled step is fastest where its rows stay in the cache."""
        most = max(1, LARGEST // max(weights, *map(_entries, members)))
        if self.step.compile:
            most = min(most, max(LEAST, CACHED // weights))
        size = math.ceil(len(members) / math.ceil(len(members) / most))
        for start in range(0, len(members), size):
            yield members[start : start + size]

    def _member(self, round: int, client: int) -> Member:
        data, rule = Batches(self.clients[client], self.model.device, self.task.collate), self.algorithm.perturbation
        mask = rule.draws or data.tensors is None
        return Member(
            client,
            data,
            size_of(self.clients[client]),
            self.local.epochs_of(self.seed, round, client),
            seeds.generator(self.seed, "batches", round, client),
            seeds.derive(self.seed, "step", round, client) if mask else 0,
        )

    def _kind(self, member: Member) -> tuple[object, ...]:
        """Members of one kind can be in one stack."""
        held = member.data.tensors
        if held is None or self.local.augment is not None:
            return member.size, member.epochs
        kind = tuple((name, tensor.shape[1:], tensor.dtype) for name, tensor in named_tensors(held))
        return kind if self._fills(member) else (*kind, member.size, member.epochs)

    def _fills(self, member: Member) -> bool:
        """Whether small batches are filled up; a rule that teaches would average over what fills them."""
        return not self.algorithm.perturbation.teaches and can_fill_up(self.task, member.data)

    def together(
        self, broadcast: Broadcast, members: list[Member], before_step: Callable[[], None]
    ) -> list[ClientResult]:
        """The results of clients, those with more steps first; without those whose numbers are not finite."""
        size, rule = self.local.batch_size, self.algorithm.perturbation
        steps = [member.steps(size) for member in members]
        width = self.widest = max(self.widest, len(members)) if self.step.compile else len(members)
        memories = [self.store.get(member.client, Memory()).to(self.model.device) for member in members]
        run = Run(self.algorithm.at(broadcast.round), self.local, broadcast)
        rows = begin_rows(run, memories, [m.mask for m in members] if rule.draws else [], steps, width)
        feed = self._feed(members, width)
        self.model.load_buffers(broadcast.buffers)
        self.model.module.train()
        held = self.model.state.tensors()
        noise = torch.zeros_like(rows.own["u"]) if rule.draws and rule.gradient != "unused" else None
        ends, losses = Ends(steps), []
        for number in range(steps[0]):
            before_step()
            count = width if self.step.compile else ends.running(number)
            if noise is not None:
                draw_noise(noise[:count], members, number)
            batch = feed(number, count)
            part = rows.first(count)
            losses.append(self.step(part, batch, number, noise if noise is None else noise[:count]))
            if part is rows:
                ends.keep(rows, number)
        ends.restore(rows)
        self.model.backward_passes += sum(steps) * rule.passes
        self._check_buffers(broadcast, held)
        return self._results(broadcast, members, rows, steps, losses)

    def _feed(self, members: list[Member], width: int) -> Gathered | Fetched:
        if any(member.data.tensors is None for member in members) or self.local.augment is not None:
            return Fetched(members, self.local.batch_size, self.local.augment)
        ragged = len({(member.size, member.epochs) for member in members}) > 1
        fill = ragged or (self.step.compile and self._fills(members[0]))
        return Gathered(members, self.local.batch_size, width, fill)

    def _results(
        self, broadcast: Broadcast, members: list[Member], rows: Rows, steps: list[int], losses: list[Tensor]
    ) -> list[ClientResult]:
        longest = torch.nn.utils.rnn.pad_sequence(losses).tolist()
        answers = finish_rows(rows, steps)
        finite = rows_of([answer.result.update for answer in answers]).isfinite().all(1).tolist()
        results = []
        for i, (member, answer) in enumerate(zip(members, answers, strict=True)):
            own = longest[i][: steps[i]]
            if finite[i] and all(map(math.isfinite, own)):
                slots = answer.perturbation, answer.correction, broadcast.buffers, answer.memory
                results.append(ClientResult(member.client, member.size, answer.result, sum(own) / len(own), *slots))
        return results

    def _check_buffers(self, broadcast: Broadcast, held: dict[str, Tensor]) -> None:
        """One module stands for all clients of a group, so they cannot differ in what it keeps."""
        replaced = self.model.state.replaced(held)
        if replaced:
            raise NotStackable(CHANGES.format(", ".join(replaced)))
        self.model.state.check()
        for name, tensor in self.model.buffers().items():
            if not same_bits(tensor, broadcast.buffers[name]):
                raise NotStackable(CHANGES.format(name))


class Ends:
    """Keeps the rows of clients that have made their last step while others go on.

    Args:
        steps: of each client, the most first.
    """

    def __init__(self, steps: Sequence[int]) -> None:
        self.steps = steps
        self.kept: list[tuple[slice, Tree]] = []

    def running(self, number: int) -> int:
        """The clients that make this step."""
        return sum(steps > number for steps in self.steps)

    def keep(self, rows: Rows, number: int) -> None:
        """After a step: copy the rows for which it was the last, if there will be more."""
        before, after = self.running(number), self.running(number + 1)
        if after and before > after:
            place = slice(after, before)
            self.kept.append((place, map_tree(_changing(rows), lambda t: t[place].clone())))

    def restore(self, rows: Rows) -> None:
        """Put all that was kept back into its place."""
        for place, tree in self.kept:
            for name, kept in flatten(**tree).items():
                flatten(**_changing(rows))[name][place] = kept


def _changing(rows: Rows) -> Tree:
    """What a client's result is made of."""
    return {name: rows.own[name] for name in ("v" if "v" in rows.own else "u", "client_state")}


def _entries(member: Member) -> int:
    return max(tensor.numel() for tensor in leaves(member.data.tensors)) if member.data.tensors is not None else 0
