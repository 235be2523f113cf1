"""What a client remembers, on its node. The server never sees it; it only says which of two memories counts.

A client that has trained does not know whether its answer will be used: it may come too late, be refused, or be lost.
Were it to commit its new memory all the same, SCAFFOLD's c would no longer be the mean of the c_i, nor FedDyn's H
that of the h_i, for ever. So a node keeps two memories, each under the ticket of the message that it was made for:
the one it trained from and the one it made. The next message names the ticket of the client's last answer that was
used, and with it the memory that counts.
"""

from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord
from safetensors import SafetensorError
from safetensors.torch import load, save

from fedlesam.core.messages import Memory, unshare
from fedlesam.flower import records
from fedlesam.flower.files import write

PREFIX = "fedlesam.memory."


class Memories:
    """The memories of a node in `Context.state`, which lives as long as the SuperNode and the run.

    With a folder also in files, which outlive both: a SuperNode that is started again, and a run that goes on from the
    server's checkpoint.
    """

    def __init__(self, state: MutableMapping[str, Any], folder: Path | None, client: int) -> None:
        self.state, self.folder, self.client = state, folder, client

    def find(self, ticket: str) -> Memory | None:
        """The memory made for `ticket`, or None if it is lost."""
        record = self.state.get(PREFIX + ticket)
        if isinstance(record, ArrayRecord):
            return records.read_memory(records.tensors(record))
        file = self._file(ticket)
        if file is None or not file.exists():
            return None
        try:
            return records.read_memory(load(file.read_bytes()))
        except (OSError, SafetensorError):
            return None

    def keep(self, **memories: Memory) -> None:
        """Just these, by ticket."""
        for old, ticket in list(self._files()):
            if ticket not in memories:
                old.unlink(missing_ok=True)
        for cut_off in self.folder.glob(f".client{self.client:06d}-*.part") if self.folder is not None else ():
            cut_off.unlink(missing_ok=True)
        for key in [key for key in self.state if key.startswith(PREFIX)]:
            if key.removeprefix(PREFIX) not in memories:
                del self.state[key]
        for ticket, memory in memories.items():
            self.state[PREFIX + ticket] = records.memory_record(memory)
            file = self._file(ticket)
            if file is not None and not file.exists():
                named = {f"perturbation.{name}": value for name, value in memory.perturbation.items()}
                named |= {f"correction.{name}": value for name, value in memory.correction.items()}
                write(file, save(unshare(named)))

    def _file(self, ticket: str) -> Path | None:
        return None if self.folder is None else self.folder / f"client{self.client:06d}-{ticket}.safetensors"

    def _files(self) -> Iterator[tuple[Path, str]]:
        if self.folder is not None:
            for file in self.folder.glob(f"client{self.client:06d}-*.safetensors"):
                yield file, file.stem.partition("-")[2]
