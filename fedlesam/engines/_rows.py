"""The rounds of many clients as rows of matrices: what they start from and what comes out, by the rules' own methods.

The rules are mapped over the rows. Clients whose memories have other names are mapped apart from each other, since a
rule may ask for a name; the rows of the steps (`_mapped.py`) hold all of them.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fedlesam.core import seeds
from fedlesam.core.local import LocalTraining
from fedlesam.core.messages import Broadcast, Memory
from fedlesam.core.slots import AffineStep, Algorithm, Correction
from fedlesam.core.step import ClientRound, settle
from fedlesam.core.vectors import is_number
from fedlesam.engines._numbers import with_numbers, without_numbers
from fedlesam.engines._replay import Replay, has_our_rules
from fedlesam.engines._trees import Tree, column_trees, dims_of, map_tree, stack_trees, take_rows


class Run(NamedTuple):
    """The round of one federation, as its clients see it."""

    algorithm: Algorithm
    local: LocalTraining
    broadcast: Broadcast
    numbers: dict[str, dict[str, float]]
    """The method's, by whose they are."""

    @property
    def lr(self) -> float:
        """The learning rate of the round."""
        return self.local.lr_at(self.broadcast.round, self.algorithm)


class Fixed(NamedTuple):
    """What is no tensor: a compiled step is made for it."""

    algorithm: Algorithm
    local: LocalTraining
    affine: AffineStep
    """Where gain and pull are the same numbers for all clients."""


@dataclass(eq=False)
class Program:
    """The step of one method for tensors of one form."""

    key: object
    run: Callable[..., Sequence[Tensor]] | None = None
    """Changes rows in place and returns the losses; None: it is not made."""
    uses: int = 0
    """How often the step was made without it."""
    fails: bool = False
    """It is not to be recorded, or cannot be."""
    checked: bool = False
    """It was seen to keep rows apart, where it has to."""


class Bound(NamedTuple):
    """A program with the tensors that it is called with."""

    shapes: Sequence[torch.Size]
    """Of the batches that it is for."""
    program: Program
    tensors: list[Tensor]
    """What it takes beside a batch."""


@dataclass
class Group:
    """The clients whose memories have the same names."""

    places: list[int]
    rows: list[int]
    """The places to compute, filled up where a computation has a fixed number of rows."""
    memory: Tree
    """What they kept, a row each, by slot and name."""
    state: Tree = field(default_factory=dict)
    """The perturbation's state of the round, at its start."""


@dataclass
class Rows:
    """The rounds of several clients, a row each."""

    runs: Sequence[Run]
    """The round of each client."""
    memories: Sequence[Memory]
    fixed: Fixed
    shared: Tree
    """What clients have in common: the anchor, the learning rate, the server's state; a row per client, or one number.

    Rows that are equal are one vector in memory.
    """
    own: Tree
    """Tensors with a row per client; `client_state` is a dict of them, empty where the steps do not use it."""
    groups: list[Group]
    bound: Bound | None = None
    """The program of their steps."""

    @property
    def width(self) -> int:
        """The number of rows, those that only fill up included."""
        return int(self.own["u"].shape[0])

    def first(self, count: int) -> "Rows":
        """The first rows, the same memory."""
        if count == self.width:
            return self
        own, shared = (map_tree(tree, lambda t: t[:count] if t.ndim else t) for tree in (self.own, self.shared))
        return Rows(self.runs, self.memories, self.fixed, shared, own, [])

    def moved(self, order: Tensor) -> "Rows":
        """Copies of the rows in another order."""
        own, shared = (
            map_tree(tree, lambda t: t.index_select(0, order) if t.ndim else t) for tree in (self.own, self.shared)
        )
        return Rows(self.runs, self.memories, self.fixed, shared, own, [])

    @cached_property
    def scratch(self) -> tuple[str, ...]:
        """Rows that a step overwrites before it reads them."""
        rule = self.fixed.algorithm.perturbation
        return ("g", *(["ascent"] if rule.gradient in ("none", "current") else []), *self.own.keys() & {"first"})

    @cached_property
    def in_steps(self) -> Tree:
        """What a step uses of `shared`."""
        rule = self.fixed.algorithm.perturbation
        uses = rule.gradient != "unused" or rule.teaches
        return {**self.shared, "correction": {}, **({} if uses else {"perturbation": {}})}


def round_of(fixed: Fixed, shared: Tree, own: Tree) -> ClientRound:
    """One client's round, from the tensors that it shares and its own row."""
    gain, pull, bias = fixed.affine
    algorithm, local = _numbered(fixed.algorithm, fixed.local, shared)
    return ClientRound(
        algorithm=algorithm,
        local=local,
        lr=shared["lr"],
        anchor=shared["anchor"],
        steps=own.get("steps", 1),
        client_state=dict(own["client_state"]),
        server_state=shared["perturbation"],
        affine=AffineStep(own.get("gain", gain), own.get("pull", pull), own.get("bias", bias)),
        centre=own["e"] if "e" in own else shared["zero"],
        u=own["u"],
        v=own["v"] if "v" in own else own["u"],
        g=own["g"],
        ascent=own.get("ascent"),
        first=own.get("first"),
        momentum=own.get("momentum"),
        second=own.get("second"),
        e=own.get("e"),
        mapped=True,
    )


def begin_rows(
    runs: Sequence[Run],
    memories: Sequence[Memory],
    masks: Sequence[int],
    steps: Sequence[int],
    width: int,
    apart: bool,
    replay: Replay,
) -> Rows:
    """Start the rounds of several clients.

    Args:
        runs: the round of each client; without `apart` they are one.
        memories: what each client kept.
        masks: each client's seed, for rules that draw; empty for others.
        steps: that each client will take.
        width: rows to make; those beyond the clients have any content.
        apart: give every row its own model and numbers, and compute all rows always.
        replay: calls the rules.
    """
    run = runs[0]
    anchor, rule = run.broadcast.weights, run.algorithm.perturbation
    shared = _apart(runs, width) if apart else _in_common(run, width)
    method = without_numbers(run.algorithm, run.local) if apart else (run.algorithm, run.local)
    own: Tree = {"u": shared["anchor"].clone(memory_format=torch.contiguous_format), "client_state": {}}
    own["g"] = torch.empty_like(own["u"])
    groups = grouped(memories, width if apart else None)
    found = []
    for group in groups:
        if masks and rule.gradient == "unused":
            each = [_settled_alone(runs[i], memories[i], masks[i]) for i in group.places]
            some = stack_trees(each + each[:1] * (len(group.rows) - len(each)))
        else:
            some = _settled(method, shared, group, replay)
        group.state = some.pop("state")
        found.append(some if rule.gradient == "unused" else {**some, "client_state": group.state})
    affine = _same_numbers(found, ("gain", "pull"))
    for group, some in zip(groups, found, strict=True):
        _put(own, some, group.places, anchor.new_zeros(width))
    if rule.is_constant:
        own["u"] += own.setdefault("e", torch.zeros_like(own["u"]))
    if type(run.algorithm.correction).prepare is not Correction.prepare:
        own.setdefault("bias", torch.zeros_like(own["u"]))
    if rule.gradient != "unused":
        own |= {"v": own["u"].clone(), "ascent": torch.zeros_like(own["u"])}
    if masks and rule.gradient != "unused":
        own["mask"] = torch.tensor([*masks, *[0] * (width - len(masks))], device=anchor.device)
    if not is_number(rule.mix, 1):
        own["first"] = torch.zeros_like(own["u"])
    if not is_number(run.algorithm.lr_floor, 1):
        own["steps"] = anchor.new_tensor([float(steps[i]) if i < len(steps) else 1.0 for i in range(width)])
    if run.local.momentum or run.local.optimizer == "adamw":
        own["momentum"] = torch.zeros_like(own["u"])
    if run.local.optimizer == "adamw":
        own["second"] = torch.zeros_like(own["u"])
    own["client_state"] = dict(sorted(own["client_state"].items()))
    same_order = dict(sorted(own.items()))  # whatever clients remember: a program is for one order
    return Rows(runs, memories, Fixed(*method, AffineStep(**affine)), shared, same_order, groups)


def _in_common(run: Run, width: int) -> Tree:
    """What the clients of one round share: rows that are one vector in memory."""
    sent, anchor = run.broadcast, run.broadcast.weights
    tree = {"anchor": anchor, "perturbation": sent.perturbation, "correction": sent.correction}
    rows = map_tree(tree, lambda t: t.expand(width, *t.shape))
    return {**rows, "lr": anchor.new_tensor(run.lr), "zero": anchor.new_zeros(())}


def _apart(runs: Sequence[Run], width: int) -> Tree:
    """The same for clients of several rounds, each with its own numbers."""
    numbers: dict[int, dict[str, Any]] = {}
    for run in runs:
        if id(run) not in numbers:
            numbers[id(run)] = {"numbers": run.numbers, "lr": run.lr}
    every, weights = [*runs, *[runs[0]] * (width - len(runs))], runs[0].broadcast.weights
    rows = stack_trees(
        [{"anchor": b.weights, "perturbation": b.perturbation, "correction": b.correction} for _, _, b, _ in every]
    )
    return {**rows, **column_trees([numbers[id(run)] for run in every], weights), "zero": weights.new_zeros(())}


def grouped(memories: Sequence[Memory], width: int | None) -> list[Group]:
    """The clients by the names of what they kept, with so many rows; None: as many as clients."""
    alike: dict[tuple[tuple[str, ...], ...], list[int]] = defaultdict(list)
    for i, memory in enumerate(memories):
        alike[memory.names].append(i)
    groups = []
    for places in alike.values():
        rows = places + places[:1] * (0 if width is None else width - len(places))
        kept = [{"perturbation": memories[i].perturbation, "correction": memories[i].correction} for i in rows]
        groups.append(Group(places, rows, stack_trees(kept)))
    return groups


def _settled(method: tuple[Algorithm, LocalTraining], shared: Tree, group: Group, replay: Replay) -> Tree:
    """What the rules fix for the round, a row per client; gain and pull may be plain numbers."""

    def every(shared: Tree, memory: Tree) -> tuple[Tree, Tree]:
        numbers: Tree = {}

        def one(shared: Tree, memory: Tree) -> Tree:
            sent = Broadcast(0, shared["anchor"], {}, shared["perturbation"], shared["correction"])
            state, affine, e = settle(_numbered(*method, shared)[0], sent, Memory(**memory))
            return {"state": state, **_tensors({**affine._asdict(), "e": e}, numbers)}

        return vmap(one, (dims_of(shared), 0), randomness="error")(shared, memory), numbers

    ours = has_our_rules(method[0])
    found, numbers = replay(("settle", method), ours, every, take_rows(shared, group.rows), group.memory)
    return {**found, **{name: value for name, value in numbers.items() if value is not None}}


def _tensors(values: Tree, rest: Tree) -> Tree:
    """The tensors of a dict; what is none goes into `rest`."""
    rest |= {name: value for name, value in values.items() if not isinstance(value, Tensor)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _numbered(algorithm: Algorithm, local: LocalTraining, shared: Tree) -> tuple[Algorithm, LocalTraining]:
    """The method of a row, whose numbers may be its own."""
    return with_numbers(algorithm, local, shared["numbers"]) if "numbers" in shared else (algorithm, local)


def _settled_alone(run: Run, memory: Memory, mask: int) -> Tree:
    """The same for one client of a rule that draws, from its own seed."""
    seeds.reseed_torch(mask, run.broadcast.weights.device)
    state, affine, e = settle(run.algorithm, run.broadcast, memory)
    numbers = {name: value for name, value in {**affine._asdict(), "e": e}.items() if value is not None}
    return {"state": state, **numbers}


def _same_numbers(found: Sequence[Tree], names: Sequence[str]) -> Tree:
    """Take out what is the same number for all groups."""
    same = {}
    for name in names:
        values = [some[name] for some in found]
        if not any(isinstance(value, Tensor) for value in values) and len(set(values)) == 1:
            same[name] = values[0]
            for some in found:
                del some[name]
    return same


def _put(own: Tree, found: Tree, places: list[int], like: Tensor) -> None:
    """Write the rows of some clients to their places; a matrix that is new is zero elsewhere."""
    width = len(like)
    for name, value in found.items():
        if isinstance(value, dict):
            _put(own.setdefault(name, {}), value, places, like)
        elif isinstance(value, Tensor) and len(places) == width:
            own[name] = value.contiguous()
        else:
            if name not in own:
                one = value[0] if isinstance(value, Tensor) else like.new_tensor(0.0)
                own[name] = one.new_zeros(width, *one.shape)
            rows = value[: len(places)] if isinstance(value, Tensor) else value
            own[name][torch.tensor(places, device=like.device)] = rows
