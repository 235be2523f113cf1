"""Simulate the local training of the coming round; the federation does not change."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from fedlesam.core import seeds
from fedlesam.core.client import local_update
from fedlesam.core.messages import Memory
from fedlesam.federation import Federation


@dataclass(frozen=True)
class Place:
    """The state of a client before its next local step."""

    client: int
    """Its number."""
    v: Tensor
    """Its local model."""
    e: Tensor | None
    """The perturbation of this step, if it has one. The next step may overwrite it."""
    moving: bool
    """False if it has finished its local training."""


def check_memories(who: str, federation: Federation, instead: str = "") -> None:
    """A ValueError if the memories of the clients are in the workers, where a probe cannot read them.

    Args:
        who: The probe.
        federation: What it measures.
        instead: Another remedy, added to the message.
    """
    if not federation.knows_memories:
        raise ValueError(
            f"{who} reads the memories of the clients, and with --store pinned they stay with the workers: "
            f"use --store shared or one worker{instead}"
        )


def lockstep(federation: Federation, active: Sequence[int]) -> Iterator[list[Place]]:
    """All active clients advance step by step together, each on its own model; a finished one waits for the others.

    Args:
        federation: Between two rounds.
        active: The clients.
    """
    data, rules, local = federation.clients, federation.algorithm, federation.local
    sent = federation.state.sent(rules)
    walks = {}
    for client in active:
        memory, model = federation.memories.get(client, Memory()), federation.replica()
        seed, task = federation.seed, federation.task
        walks[client] = local_update(
            model, data[client], rules, local, sent, memory, client=client, seed=seed, task=task
        )
    ends: dict[int, Tensor] = {}
    while True:
        places = []
        with seeds.preserve_rng(federation.state.weights.device):
            for client, walk in walks.items():
                try:
                    step = next(walk) if client not in ends else None
                except StopIteration as end:
                    step, ends[client] = None, sent.weights + end.value.result.update
                if step is None:
                    places.append(Place(client, ends[client], None, moving=False))
                else:
                    places.append(Place(client, step.weights(), step.e, moving=True))
        if not any(place.moving for place in places):
            return
        yield places


def heard(federation: Federation) -> list[int]:
    """The active clients of the coming round, without those that dropout silences.

    Args:
        federation: Between two rounds.
    """
    active = federation.draw_active(federation.state.round)
    silent = federation.draw_silent(federation.state.round, active)
    return [client for client in active if client not in silent]


def trained(
    federation: Federation, asked: Sequence[int], dropped: dict[int, str] | None = None
) -> Iterator[tuple[int, Tensor]]:
    """The local models of clients at the end of the round, one after the other.

    Args:
        federation: Between two rounds.
        asked: The clients. Those that the round would drop are dropped; an error that would stop the run is raised.
        dropped: Filled with the dropped clients and the reason, at the end.
    """
    engine, sent = federation.understudy(), federation.state.sent(federation.algorithm)
    answers = engine.accepted(sent, asked, engine.reduction(sent, asked), lambda: None)
    while True:
        with seeds.preserve_rng(sent.weights.device):
            answer = next(answers, None)
        if answer is None:
            break
        yield answer.client, sent.weights + answer.result.update
    if dropped is not None:
        dropped |= engine.dropped


def answering(federation: Federation, asked: Sequence[int]) -> tuple[list[int], dict[int, str]]:
    """The clients that the coming round will not drop, and the reason for each of the others, by simulating it.

    Args:
        federation: Between two rounds.
        asked: The clients.
    """
    dropped: dict[int, str] = {}
    if not federation.failures.drops:
        return list(asked), dropped
    for _ in trained(federation, asked, dropped):
        pass
    return [client for client in asked if client not in dropped], dropped


def named(dropped: dict[int, str]) -> list[str]:
    """A message for each dropped client.

    Args:
        dropped: Reasons by client.
    """
    return [f"client {client} is dropped: {why}" for client, why in sorted(dropped.items())]
