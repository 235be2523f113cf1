"""The coming round's local training, played beside the federation: nothing of it is kept."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from fedlesam.core import seeds
from fedlesam.core.client import LocalStep, local_update
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.messages import ClientResult, Memory
from fedlesam.federation import Federation


@dataclass(frozen=True)
class Place:
    """Where a client is before its next step."""

    client: int
    v: Tensor
    """Its local model."""
    e: Tensor | None
    """The perturbation of this step, where it has one. The next step may overwrite it."""
    moving: bool
    """False: it has finished its round and waits for the others."""


def check_memories(who: str, federation: Federation, instead: str = "") -> None:
    if not federation.knows_memories:
        raise ValueError(
            f"{who} reads what clients remember, and with --store pinned that stays with the workers: "
            f"use --store shared or one worker{instead}"
        )


def lockstep(federation: Federation, active: Sequence[int]) -> Iterator[list[Place]]:
    """All active clients advance step by step together, on a model each; a finished one stays where it is."""
    walks = {client: _steps(federation, client, federation.replica()) for client in active}
    ends: dict[int, Tensor] = {}
    while True:
        places = []
        with seeds.preserve_rng(federation.state.weights.device):
            for client, walk in walks.items():
                try:
                    step = next(walk) if client not in ends else None
                except StopIteration as end:
                    step, ends[client] = None, federation.state.weights + end.value.result.update
                moving = step is not None
                v = step.weights() if step is not None else ends[client]
                places.append(Place(client, v, step.e if step is not None else None, moving))
        if not any(place.moving for place in places):
            return
        yield places


def heard(federation: Federation) -> list[int]:
    """The coming round's active clients but for those that dropout silences."""
    active = federation.draw_active(federation.state.round)
    silent = federation.draw_silent(federation.state.round, active)
    return [client for client in active if client not in silent]


def trained(
    federation: Federation, asked: Sequence[int], dropped: dict[int, str] | None = None
) -> Iterator[tuple[int, Tensor]]:
    """The clients' local models at the end of the round, one after the other.

    Whom the round would leave out is left out here, by the same rules: `dropped` is told why. Who would stop the run
    raises.
    """
    engine, sent = federation.understudy(), federation.state.broadcast()
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
    """Those of the clients that will be part of the round, and why the others will not; it is played to find out."""
    dropped: dict[int, str] = {}
    if not federation.failures.drops:
        return list(asked), dropped
    for _ in trained(federation, asked, dropped):
        pass
    return [client for client in asked if client not in dropped], dropped


def named(dropped: dict[int, str]) -> list[str]:
    return [f"client {client} is left out: {why}" for client, why in sorted(dropped.items())]


def _steps(federation: Federation, client: int, model: FlatModel) -> Generator[LocalStep, None, ClientResult]:
    return local_update(
        model,
        federation.clients[client],
        federation.algorithm,
        federation.local,
        federation.state.broadcast(),
        federation.memories.get(client, Memory()),
        client=client,
        seed=federation.seed,
    )
