"""The local training of one stack of clients, from what they start with to their results."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlesam.core.batches import Batch
from fedlesam.core.buffers import same_bits
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.local import LocalTraining
from fedlesam.core.messages import ClientResult, Memory
from fedlesam.core.state import flatten
from fedlesam.engines._answers import finish_rows
from fedlesam.engines._feed import Fetched, Gathered, Member
from fedlesam.engines._mapped import MappedStep, NotStackable
from fedlesam.engines._replay import Replay
from fedlesam.engines._rows import Rows, Run, begin_rows
from fedlesam.engines._trees import Tree, map_tree

Feed = Callable[[int, int], Batch]
"""Gives the batches of a step for the first rows; steps are asked for in their order."""

CHANGES = "the stacked engine cannot train models that change buffers such as BatchNorm's; use the plain engine ({})"


@dataclass
class Entry:
    """A client of a stack, with its federation's round and what it kept."""

    member: Member
    run: Run
    memory: Memory

    @property
    def steps(self) -> int:
        """The local steps of its round."""
        return self.member.steps


def train_stack(
    step: MappedStep,
    entries: Sequence[Entry],
    feed: Feed,
    width: int,
    apart: bool,
    before_step: Callable[[], None],
) -> list[ClientResult | None]:
    """Train clients together; None for one whose numbers are not finite.

    Args:
        step: the step of their method.
        entries: the clients, those with more steps first; without `apart` they are of one federation.
        feed: their batches.
        width: rows of the computation.
        apart: every row has its own model and numbers, so that it does not matter who shares the stack.
        before_step: called before every local step; it may raise.
    """
    members, steps = [entry.member for entry in entries], [entry.steps for entry in entries]
    run, whole = entries[0].run, apart or step.compile
    masks = [member.mask for member in members] if run.algorithm.perturbation.draws else []
    runs, memories = [entry.run for entry in entries], [entry.memory for entry in entries]
    rows = begin_rows(runs, memories, masks, steps, width, apart, step.replay)
    ends, losses = Ends(steps), []
    held = _load(step.model, run)
    step.called = False
    for number in range(steps[0]):
        before_step()
        count = width if whole else ends.running(number)
        part = rows.first(count)
        losses.append(step(part, feed(number, count), number))
        if part is rows:
            ends.keep(rows, number)
    ends.restore(rows)
    if step.called:
        _check_buffers(step.model, run, held)
    return _results(entries, rows, steps, losses, step.replay)


def feed_of(local: LocalTraining, members: Sequence[Member], width: int, whole: bool) -> Feed:
    """The batches of a stack.

    Args:
        local: how they train.
        members: the clients.
        width: rows of a batch.
        whole: whether all batches have the same size, if they can.
    """
    if any(member.data.tensors is None for member in members) or local.augment is not None:
        return Fetched(members, local.batch_size, width, local.augment)
    ragged = len({(member.size, member.steps) for member in members}) > 1
    fill = ragged or (whole and members[0].fills)
    return Gathered(members, local.batch_size, width, fill)


def _load(model: FlatModel, run: Run) -> dict[str, Tensor]:
    model.load_buffers(run.broadcast.buffers)
    model.module.train()
    return model.state.tensors()


def _check_buffers(model: FlatModel, run: Run, held: dict[str, Tensor]) -> None:
    """One module stands for all clients of a stack, so they cannot differ in what it keeps."""
    replaced = model.state.replaced(held)
    if replaced:
        raise NotStackable(CHANGES.format(", ".join(replaced)))
    model.state.check()
    for name, tensor in model.buffers().items():
        if not same_bits(tensor, run.broadcast.buffers[name]):
            raise NotStackable(CHANGES.format(name))


def _results(
    entries: Sequence[Entry], rows: Rows, steps: list[int], losses: list[Tensor], replay: Replay
) -> list[ClientResult | None]:
    answers, means = finish_rows(rows, steps, replay), _means(losses, steps)
    results: list[ClientResult | None] = []
    for entry, answer, loss in zip(entries, answers, means, strict=True):
        if not (math.isfinite(answer.norms[0]) and math.isfinite(loss)):
            results.append(None)
            continue
        slots = answer.perturbation, answer.correction, entry.run.broadcast.buffers, answer.memory, answer.norms
        results.append(ClientResult(entry.member.client, entry.member.size, answer.result, loss, *slots))
    return results


def _means(losses: list[Tensor], steps: list[int]) -> list[float]:
    """Of each client's losses, added from its first step to its last."""
    totals = torch.nn.utils.rnn.pad_sequence(losses)[: len(steps)].double().cumsum(1)
    counts = torch.tensor(steps, device=totals.device)[:, None]
    means: list[float] = totals.gather(1, counts - 1).div_(counts)[:, 0].tolist()
    return means


class Ends:
    """Keeps the rows of clients that have made their last step while others continue.

    Args:
        steps: of each client, the most first.
    """

    def __init__(self, steps: Sequence[int]) -> None:
        self.kept: list[tuple[slice, Tree]] = []
        self._running = [0] * (steps[0] + 1)
        for count, own in enumerate(steps, 1):
            self._running[:own] = [count] * own

    def running(self, number: int) -> int:
        """The clients that make this step."""
        return self._running[number]

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
