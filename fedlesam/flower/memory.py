"""The memory of a client on its node. The server never receives it; it only names which of two memories is valid.

A client that has trained does not know whether its answer will be used: it may come too late, be refused, or be lost.
If it committed its new memory in any case, SCAFFOLD's c would no longer be the mean of the c_i, nor FedDyn's H that of
the h_i. So a node keeps two memories, each under the ticket of the message that it was made for: the one it trained
from and the new one. The next message has the ticket of the client's last answer that was used: its memory is valid.
"""

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord

from fedlesam.core import disk
from fedlesam.core.messages import Memory
from fedlesam.core.state import UNREADABLE, from_bytes, to_bytes
from fedlesam.flower import records

PREFIX = "fedlesam.memory."


class Memories:
    """The memories of a node in `Context.state`, which lives as long as the SuperNode and the run.

    Args:
        state: of the node's Context.
        folder: for copies in files. They survive a restart of the SuperNode, and serve a run that is resumed from the
            server's checkpoint.
        client: the client's number.
    """

    def __init__(self, state: MutableMapping[str, Any], folder: Path | None, client: int) -> None:
        self.state, self.folder, self.client = state, folder, client

    def find(self, ticket: str) -> Memory | None:
        """The memory made for a ticket; None if it is lost.

        Args:
            ticket: of the message.
        """
        record = self.state.get(PREFIX + ticket)
        if isinstance(record, ArrayRecord):
            return Memory.unflatten(records.tensors(record))
        file = self._file(ticket)
        try:
            return Memory.unflatten(from_bytes(file.read_bytes())[0]) if file is not None else None
        except UNREADABLE:
            return None

    def keep(self, memories: dict[str, Memory]) -> None:
        """Replace all memories by these.

        Args:
            memories: by ticket.
        """
        for key in [key for key in self.state if key.startswith(PREFIX)]:
            if key.removeprefix(PREFIX) not in memories:
                del self.state[key]
        if self.folder is not None:
            name = f"client{self.client:06d}"
            for file in [*self.folder.glob(f"{name}-*.safetensors"), *self.folder.glob(f".{name}-*{disk.PART}")]:
                if file.stem.partition("-")[2] not in memories:
                    file.unlink(missing_ok=True)
        for ticket, memory in memories.items():
            tensors = memory.flatten()
            self.state[PREFIX + ticket] = records.arrays(tensors)
            new = self._file(ticket)
            if new is not None and not new.exists():
                disk.write_bytes(new, to_bytes(tensors))

    def _file(self, ticket: str) -> Path | None:
        return None if self.folder is None else self.folder / f"client{self.client:06d}-{ticket}.safetensors"
