"""The sum of what each client has sent, for methods whose server state is a sum over clients.

SCAFFOLD's c is the mean of all c_i, FedDyn's H that of all h_i. A client that has lost its memory starts again from
c_i = 0. Its old c_i must then be removed from c, or c is wrong from then on. The client does not know it any more, but
the server does: c_i is the sum of the changes that the client sent and the server used, h_i that of its updates.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedlesam.algorithms import Algorithm
from fedlesam.core import disk
from fedlesam.core.messages import ClientResult
from fedlesam.core.server import ServerState
from fedlesam.core.slots import Rule, State
from fedlesam.core.state import UNREADABLE, flatten, from_bytes, to_bytes, unflatten

SLOTS = ("perturbation", "correction", "server")
REMEDY = "restore the folder from a copy, or start anew in an empty one"


def summing_slots(algorithm: Algorithm) -> list[str]:
    """The slots whose server state is a sum over clients.

    Args:
        algorithm: the method.
    """
    return [slot for slot in SLOTS if type(getattr(algorithm, slot)).remove_client is not Rule.remove_client]


@dataclass(frozen=True)
class StateFile:
    """A safetensors file that is never changed."""

    file: str
    """Its name in the folder."""
    sha256: str
    """Of its content, in hexadecimal digits."""

    @classmethod
    def write(cls, folder: Path, name: str, tensors: State) -> "StateFile":
        """Write tensors.

        Args:
            folder: where the file goes.
            name: of the file; {digest} stands for the first digits of its checksum.
            tensors: a flat dict (core/state.py).
        """
        content = to_bytes(tensors)
        digest = hashlib.sha256(content).hexdigest()
        written = cls(name.format(digest=digest[:8]), digest)
        disk.write_bytes(folder / written.file, content)
        return written

    def read(self, folder: Path) -> State:
        """The tensors; a ValueError if the file is not the one that was written.

        Args:
            folder: where the file is.
        """
        path = folder / self.file
        try:
            content = path.read_bytes()
            if hashlib.sha256(content).hexdigest() == self.sha256:
                return from_bytes(content)[0]
        except UNREADABLE as error:
            raise ValueError(f"{path}: cannot be read: {error}; {REMEDY}") from error
        raise ValueError(f"{path}: is not the file that the checkpoint names (its checksum differs); {REMEDY}")


@dataclass(frozen=True)
class ClientSums:
    """One vector per client and slot, on the CPU as in their files. Never changed in place.

    Args:
        folder: for the vectors; None keeps them in RAM.
        clients: the sums of each client.
    """

    folder: Path | None = None
    clients: Mapping[int, StateFile | State] = field(default_factory=dict)

    def of(self, client: int) -> dict[str, State]:
        """The sums of a client by slot.

        Args:
            client: the client; one that never sent anything has none.
        """
        sums = self.clients.get(client, {})
        if isinstance(sums, StateFile):
            assert self.folder is not None
            sums = sums.read(self.folder)
        return unflatten(sums, *SLOTS)

    def plus(self, algorithm: Algorithm, round: int, answers: Iterable[ClientResult], lost: set[int]) -> "ClientSums":
        """The sums after a round.

        Args:
            algorithm: the method.
            round: the round.
            answers: what its clients sent.
            lost: the clients that had lost their memory; their sums start again.
        """
        slots, clients = summing_slots(algorithm), dict(self.clients)
        for answer in answers if slots else ():
            sums = {} if answer.client in lost else flatten(**self.of(answer.client))
            for name, value in _uploads(answer, slots).items():
                sums[name] = sums[name] + value if name in sums else value
            file = f"client{answer.client:06d}-round{round:06d}.safetensors"
            clients[answer.client] = sums if self.folder is None else StateFile.write(self.folder, file, sums)
        return replace(self, clients=clients)


def remove_clients(
    state: ServerState, algorithm: Algorithm, sums: ClientSums, lost: Iterable[int], clients: int
) -> ServerState:
    """The server state as if some clients had never been active; the model stays.

    Args:
        state: the server's.
        algorithm: the method.
        sums: what each client has sent.
        lost: the clients to remove.
        clients: the number of all clients.
    """
    for client in sorted(lost):
        own = sums.of(client) if client in sums.clients else {}
        for slot in summing_slots(algorithm) if own else ():
            uploads = {name: value.to(state.weights.device) for name, value in own[slot].items()}
            slot_state = getattr(algorithm, slot).remove_client(getattr(state, slot), uploads, 1 / clients)
            state = replace(state, **{slot: slot_state})
    return state


def _uploads(answer: ClientResult, slots: list[str]) -> State:
    uploads = dict(zip(SLOTS, (answer.perturbation, answer.correction, {"update": answer.result.update}), strict=True))
    return {name: value.cpu() for name, value in flatten(**{slot: uploads[slot] for slot in slots}).items()}
