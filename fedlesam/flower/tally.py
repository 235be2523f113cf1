"""What each client has sent so far, for methods whose server state is a sum over clients.

SCAFFOLD's c is the mean of all c_i, FedDyn's H that of all h_i. A client whose memory is lost starts again from c_i =
0; then its old c_i has to leave c, or c would be wrong for ever. The client cannot say what it was, but the server
has heard it: c_i is the sum of the changes that the client sent and the server used, h_i that of its updates.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from fedlesam.algorithms import Algorithm
from fedlesam.core.messages import ClientResult, unshare
from fedlesam.core.server import ServerState
from fedlesam.core.slots import Rule, State
from fedlesam.flower.files import write

SLOTS = ("perturbation", "correction", "server")


def summing(algorithm: Algorithm) -> list[str]:
    """The slots whose server state is a sum over clients."""
    return [slot for slot in SLOTS if type(getattr(algorithm, slot)).remove_client is not Rule.remove_client]


@dataclass(frozen=True)
class Kept:
    """One client's sums in a file."""

    file: str
    sha256: str


@dataclass(frozen=True)
class Tally:
    """Never changed in place; in files if there is a folder, else in RAM: one vector per client and slot."""

    folder: Path | None = None
    clients: Mapping[int, Kept | State] = field(default_factory=dict)

    def of(self, client: int) -> State:
        kept = self.clients.get(client, {})
        if not isinstance(kept, Kept):
            return dict(kept)
        assert self.folder is not None
        return load_checked(self.folder / kept.file, kept.sha256)

    def plus(self, algorithm: Algorithm, round: int, answers: Iterable[ClientResult], lost: set[int]) -> "Tally":
        """With what these clients sent; those that had lost their memory begin anew."""
        slots, clients = summing(algorithm), dict(self.clients)
        for answer in answers if slots else ():
            sums = {} if answer.client in lost else self.of(answer.client)
            for name, value in _sent(answer, slots).items():
                sums[name] = sums[name] + value if name in sums else value
            clients[answer.client] = self._keep(f"client{answer.client:06d}-round{round:06d}.safetensors", sums)
        return replace(self, clients=clients)

    def _keep(self, name: str, sums: State) -> Kept | State:
        if self.folder is None:
            return sums
        content = save(unshare({key: value.cpu() for key, value in sums.items()}))
        write(self.folder / name, content)
        return Kept(name, hashlib.sha256(content).hexdigest())


def without(state: ServerState, algorithm: Algorithm, tally: Tally, lost: Iterable[int], clients: int) -> ServerState:
    """The server state as if these clients had never been active; the model stays, it is what was learned."""
    for client in sorted(lost):
        sums = tally.of(client)
        for slot in summing(algorithm) if sums else ():
            sent = {name.partition(".")[2]: value for name, value in sums.items() if name.startswith(f"{slot}.")}
            sent = {name: value.to(state.weights.device) for name, value in sent.items()}
            rule, change = getattr(algorithm, slot), {}
            change[slot] = rule.remove_client(getattr(state, slot), sent, 1 / clients)
            state = replace(state, **change)
    return state


def _sent(answer: ClientResult, slots: list[str]) -> State:
    of: dict[str, State] = {
        "perturbation": answer.perturbation,
        "correction": answer.correction,
        "server": {"update": answer.result.update},
    }
    return {f"{slot}.{name}": value for slot in slots for name, value in of[slot].items()}


def load_checked(path: Path, sha256: str) -> dict[str, torch.Tensor]:
    """A safetensors file, if it is the one that was written."""
    remedy = "restore the folder from a copy, or start anew in an empty one"
    try:
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != sha256:
            raise ValueError(f"{path}: is not the file that the checkpoint names (its checksum differs); {remedy}")
        found: dict[str, Any] = load(content)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: cannot be read: {error}; {remedy}") from error
    return found
