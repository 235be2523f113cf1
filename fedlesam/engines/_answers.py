"""What the rounds of a stack come to, by the rules' own methods, mapped over the clients' rows."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fedlesam.core.messages import Broadcast, Memory
from fedlesam.core.reduction import norms_of
from fedlesam.core.slots import LocalResult, State
from fedlesam.core.state import flatten, unflatten
from fedlesam.core.step import finish
from fedlesam.engines._replay import Replay, has_our_rules
from fedlesam.engines._rows import Group, Rows, Run, round_of
from fedlesam.engines._trees import Tree, dims_of, take_rows

KEPT, SENT = ("e_kept", "c_kept"), ("e", "c")
"""What a client keeps and what it uploads, of the perturbation and of the correction."""


class Answer(NamedTuple):
    """What one client's round came to."""

    result: LocalResult
    memory: Memory
    perturbation: dict[str, Tensor]
    correction: dict[str, Tensor]
    norms: Sequence[float]


def finish_rows(rows: Rows, steps: Sequence[int], replay: Replay) -> list[Answer]:
    """The results of the clients, in their order; each owns what it keeps.

    Args:
        rows: their rounds, after the last step of each.
        steps: that each client took.
        replay: calls the rules.
    """
    answers: list[Answer | None] = [None] * len(rows.memories)
    rates: dict[tuple[int, int], float] = {}
    for group in rows.groups:
        own = take_rows(rows.own, group.rows)
        own = own if own["client_state"] else {**own, "client_state": group.state}
        found, links = _finished(rows, own, group, [steps[i] for i in group.rows], replay)
        norms = _norms(found, links, len(group.places))
        sources = unflatten({name: link for name, link in links.items() if name != "update"}, *KEPT, *SENT)
        slots = (_states(sources[slot], found, rows, group, slot in KEPT) for slot in (*KEPT, *SENT))
        each = zip(group.places, found[links["update"]].unbind(), norms, *slots, strict=False)
        for i, update, own_norms, e_kept, c_kept, e, c in each:
            result = LocalResult(update, steps[i], _mean_lr(rates, rows.runs[i], steps[i]))
            answers[i] = Answer(result, Memory(e_kept, c_kept), e, c, own_norms)
    return [answer for answer in answers if answer is not None]


def _norms(found: Tree, links: dict[str, str], count: int) -> list[Sequence[float]]:
    """Of the vectors that clients send, or of the update alone if another is none of the new ones."""
    sent = [source for name, source in links.items() if name.split("/")[0] in ("update", *SENT)]
    sent = sent if all(source in found for source in sent) else sent[:1]
    return norms_of(found[source][:count] for source in sent)


def _states(sources: dict[str, str], found: Tree, rows: Rows, group: Group, alone: bool) -> list[State]:
    """A slot's vectors by name, for each client; `alone`: each in memory of its own."""
    columns: list[Sequence[Tensor]] = []
    for source in sources.values():
        if source not in found:
            columns.append([_source(source, rows, i) for i in group.places])
        elif alone:
            columns.append(torch.ops.aten.unbind_copy(found[source]))
        else:
            columns.append(found[source].unbind())
    if not columns:
        return [{} for _ in group.places]
    return [dict(zip(sources, own, strict=True)) for own in zip(*columns, strict=False)]


def _mean_lr(known: dict[tuple[int, int], float], run: Run, steps: int) -> float:
    """Of a client's steps; clients of one run with as many steps have the same."""
    if (id(run), steps) not in known:
        known[id(run), steps] = run.algorithm.mean_lr(run.lr, steps)
    return known[id(run), steps]


def _finished(rows: Rows, own: Tree, group: Group, steps: list[int], replay: Replay) -> tuple[Tree, dict[str, str]]:
    """The new vectors, a row per client; and for each vector by "slot/name" which it is.

    That is a new one, or one that the client was given: then all clients share it.
    """
    same = steps[0] if len(set(steps)) == 1 and rows.shared["lr"].ndim == 0 else None

    def every(shared: Tree, own: Tree, memory: Tree, taken: Tree) -> tuple[Tree, dict[str, str]]:
        links: dict[str, str] = {}

        def one(shared: Tree, own: Tree, memory: Tree, taken: Tree) -> Tree:
            sent = Broadcast(0, shared["anchor"], {}, shared["perturbation"], shared["correction"])
            r = round_of(rows.fixed, shared, own)
            result, after, perturbation, correction = finish(r, Memory(**memory), sent, same or taken["steps"])
            slots = {"e_kept": after.perturbation, "c_kept": after.correction, "e": perturbation, "c": correction}
            known = {id(value): name for name, value in flatten(**{"weights": shared["anchor"], **memory}).items()}
            new: Tree = {}
            for name, value in flatten(update=result.update, **slots).items():
                links[name] = known.setdefault(id(value), name)
                if links[name] == name:
                    new[name] = value
            return new

        return vmap(one, (dims_of(shared), 0, 0, 0))(shared, own, memory, taken), links

    taken = {"steps": torch.tensor(steps, dtype=own["u"].dtype, device=own["u"].device)}
    shared = take_rows(rows.shared, group.rows)
    ours = has_our_rules(rows.fixed.algorithm)
    return replay(("finish", rows.fixed, same), ours, every, shared, own, group.memory, taken)


def _source(name: str, rows: Rows, i: int) -> Tensor:
    if name == "weights":
        return rows.runs[i].broadcast.weights
    return rows.memories[i].flatten()[name]
