"""The client states between rounds: in RAM up to a budget, beyond it in files.

A file holds one client's state of one round and is never changed. The index says which file is current, so a round is
committed by changing the index. Clients that keep the received model itself (FedLESAM) share one vector in RAM and one
file on disk, the anchor's.
"""

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from safetensors import SafetensorError
from torch import Tensor

from fedlesam.core import disk, state
from fedlesam.core.messages import Memory
from fedlesam.core.names import one_line
from fedlesam.core.space import cannot_write


class Store(Mapping[int, Memory]):
    """The state of every client that was ever active.

    Args:
        folder: for the states that are not in RAM. With budget 0 several processes can use one folder: the process
            that trained a client writes its file, and all commit the same rounds.
        budget: bytes that stay in RAM; None: all, 0: none.
    """

    def __init__(self, folder: Path | None = None, budget: int | None = None) -> None:
        if budget is not None and folder is None:
            raise ValueError("a memory budget needs a folder for what goes beyond it")
        self.folder, self.budget = folder, budget
        self.rounds: dict[int, int] = {}
        """The index: client -> the round its state is of."""
        self._clients: Counter[int] = Counter()
        """round -> the number of clients whose current state is of it."""
        self._resident: OrderedDict[int, Memory] = OrderedDict()
        """The states in RAM, the longest inactive first."""
        self.anchors: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        """round -> the global model it started from, while a state in RAM has it."""
        self._mapped: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        """The same, mapped from its file, while it is used."""
        self._uncommitted: set[tuple[int, int]] = set()
        """(round, client) of the files of a round that is not committed."""
        self._ram = _ByteCount()

    def __getstate__(self) -> dict[str, Any]:
        """For a spawned process, which cannot be given weak references."""
        return {**vars(self), "anchors": dict(self.anchors), "_mapped": {}}

    def __setstate__(self, values: dict[str, Any]) -> None:
        weak = {name: WeakValueDictionary(values[name]) for name in ("anchors", "_mapped")}
        vars(self).update({**values, **weak})

    @property
    def nbytes(self) -> int:
        """Bytes in RAM; a vector that clients share counts once."""
        return self._ram.nbytes

    def __getitem__(self, client: int) -> Memory:
        found = self._resident.get(client)
        return self._read(client, self.rounds[client]) if found is None else found

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.rounds))

    def __len__(self) -> int:
        return len(self.rounds)

    def prepare(self, round: int, client: int, memory: Memory, anchor: Tensor) -> Memory | None:
        """Before a commit: with budget 0, write the state of a client that was trained here.

        Args:
            round: the round.
            client: the client.
            memory: its new state.
            anchor: the global model that it received.

        Returns:
            What `commit` is given for the client; None: the state is in its file.
        """
        if self.budget != 0 or not memory:
            return memory
        self._write_early(round, client, memory, anchor)
        return None

    def make_room(self, round: int, anchor: Tensor, new: dict[int, Memory | None]) -> None:
        """Before a commit: write to files what will not fit into RAM, the longest inactive first.

        Everything that can fail is done here.

        Args:
            round: the round.
            anchor: the global model that its clients received.
            new: the new states; one that does not fit into RAM is written and replaced by None.
        """
        if self.budget is None:
            return
        old = {client: self._resident[client] for client in new if client in self._resident}
        coming = _ByteCount()
        for fresh in filter(None, new.values()):
            coming.add(fresh)
        try:
            for client in old:
                self._drop(client)
            for client in [client for client, memory in self._resident.items() if memory]:
                if self.nbytes + coming.nbytes <= self.budget:
                    break
                round_then = self.rounds[client]
                self._write_own(round_then, client, self._resident[client], self.anchors.get(round_then))
                self._drop(client)
        finally:
            for client, memory in old.items():
                self._keep(client, memory)
        for client, waiting in new.items():
            if waiting and coming.nbytes > self.budget:
                self._write_early(round, client, waiting, anchor)
                coming.remove(waiting)
                new[client] = None

    def commit(self, round: int, anchor: Tensor, memories: Mapping[int, Memory | None]) -> None:
        """Make the states of a round's clients current, all at once. Nothing is written, so nothing can fail.

        Args:
            round: the round.
            anchor: the global model that its clients received.
            memories: the new states; None: it is in its file.
        """
        old = [(client, self.rounds[client]) for client in memories if client in self.rounds]
        for client, memory in memories.items():
            self._drop(client)
            if memory is not None:
                self._keep(client, memory)
                if any(tensor is anchor for tensor in memory.flatten().values()):
                    self.anchors[round] = anchor
            self.rounds[client] = round
        self._clients.update({round: len(memories)})
        self._clients.subtract(before for _, before in old)
        unused = self._uncommitted - {(round, client) for client in memories}
        self._uncommitted = set()
        self._unlink([*old, *((client, before) for before, client in unused)])

    def save(self, folder: Path, known: Collection[str]) -> dict[str, disk.FileDigest]:
        """Write the current states to a folder so that they survive a power loss.

        Args:
            folder: where the files go.
            known: files that are there already, for certain.

        Returns:
            The digests of the files that are new there.
        """
        new = {}
        for client, round in self.rounds.items():
            name, shared = client_file(round, client), anchor_file(round)
            if name in known or (client in self._resident and not self._resident[client]):
                continue
            exists = shared in known or shared in new  # another file of that name may be torn by a power loss
            if client in self._resident:
                try:
                    self._write(folder, round, client, self._resident[client], self.anchors.get(round), exists)
                except SafetensorError as error:  # a class that another process could not name
                    raise OSError(f"{folder / name}: {error}") from error
            else:
                assert self.folder is not None
                disk.link(self.folder / name, folder / name, sync=False)
                if not exists and (self.folder / shared).exists():
                    disk.link(self.folder / shared, folder / shared, sync=False)
            new[name] = folder / name
            if not exists and (folder / shared).exists():
                new[shared] = folder / shared
        disk.sync(new.values())
        return {name: disk.digest_of(path) for name, path in new.items()}

    def load(self, folder: Path, rounds: Mapping[int, int], empty: Collection[int]) -> None:
        """Replace all states by those of a folder.

        Args:
            folder: where the files are.
            rounds: the new index.
            empty: the clients without a file, whose state is empty.
        """
        self.set_index(rounds, empty)
        for client, round in rounds.items():
            if client in empty:
                continue
            if self.folder is None:
                self._keep(client, self._read(client, round, folder))
                if round in self._mapped:
                    self.anchors[round] = self._mapped[round]
                continue
            for name in (client_file(round, client), anchor_file(round)):
                if (folder / name).exists() and not (self.folder / name).exists():
                    disk.link(folder / name, self.folder / name, sync=False)

    def set_index(self, rounds: Mapping[int, int], empty: Collection[int]) -> None:
        """Replace all states by those in the store's own folder.

        Args:
            rounds: the new index.
            empty: the clients without a file, whose state is empty.
        """
        self.clear()
        self.rounds, self._clients = dict(rounds), Counter(rounds.values())
        for client in empty:
            self._keep(client, Memory())

    def clear(self) -> None:
        """Remove all states; files stay."""
        self.rounds, self._uncommitted = {}, set()
        for container in (self._clients, self._resident, self.anchors, self._mapped):
            container.clear()
        self._ram = _ByteCount()

    def _keep(self, client: int, memory: Memory) -> None:
        self._resident[client] = memory
        self._ram.add(memory)

    def _drop(self, client: int) -> None:
        if (memory := self._resident.pop(client, None)) is not None:
            self._ram.remove(memory)

    def _unlink(self, old: list[tuple[int, int]]) -> None:
        """Delete files that the index does not name any more. One that stays does no harm; half a commit would."""
        names = []
        for client, round in old:
            names.append(client_file(round, client))
            if not self._clients[round]:
                del self._clients[round]
                names.append(anchor_file(round))
        if self.folder is None:
            return
        for name in names:
            with contextlib.suppress(OSError):
                (self.folder / name).unlink()

    def _write_early(self, round: int, client: int, memory: Memory, anchor: Tensor) -> None:
        self._uncommitted.add((round, client))
        self._write_own(round, client, memory, anchor)

    def _write_own(self, round: int, client: int, memory: Memory, anchor: Tensor | None) -> None:
        """Into the store's own folder."""
        assert self.folder is not None
        try:
            exists = (self.folder / anchor_file(round)).exists()
            self._write(self.folder, round, client, memory, anchor, exists)
        except (OSError, SafetensorError) as error:
            instead = "keep more of it in RAM: a larger --memory, with one worker or --store pinned"
            what = f"the memory of client {client}"
            raise ValueError(cannot_write(what, self.folder, error, memory.nbytes, instead)) from error

    def _write(
        self, folder: Path, round: int, client: int, memory: Memory, anchor: Tensor | None, exists: bool
    ) -> None:
        """`exists`: the anchor's file does."""
        tensors = memory.flatten()
        shared = [name for name, tensor in tensors.items() if tensor is anchor]
        if shared and anchor is not None and not exists:
            state.save(folder / anchor_file(round), {"anchor": anchor}, sync=False)
        own = {name: tensor for name, tensor in tensors.items() if tensor is not anchor}
        state.save(folder / client_file(round, client), own, sync=False, anchor=shared)

    def _read(self, client: int, round: int, folder: Path | None = None) -> Memory:
        folder = folder or self.folder
        assert folder is not None
        path = folder / client_file(round, client)
        try:
            tensors, metadata = state.load(path)
            if shared := metadata.get("anchor"):
                anchor = self._mapped.get(round)
                if anchor is None:
                    path = folder / anchor_file(round)
                    self._mapped[round] = anchor = state.load(path)[0]["anchor"]
                tensors |= dict.fromkeys(shared, anchor)
            return Memory.unflatten(tensors)
        except state.UNREADABLE as error:
            raise disk.Damaged(one_line(f"{path}: the memory of client {client} cannot be read: {error}")) from error


class _ByteCount:
    """The bytes of several client states together; a vector that several share counts once."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._holders: Counter[int] = Counter()

    def add(self, memory: Memory) -> None:
        for tensor in memory.flatten().values():
            self._holders[tensor.data_ptr()] += 1
            self.nbytes += tensor.nbytes if self._holders[tensor.data_ptr()] == 1 else 0

    def remove(self, memory: Memory) -> None:
        for tensor in memory.flatten().values():
            self._holders[tensor.data_ptr()] -= 1
            if not self._holders[tensor.data_ptr()]:
                del self._holders[tensor.data_ptr()]
                self.nbytes -= tensor.nbytes


def client_file(round: int, client: int) -> str:
    """The name of a client's file.

    Args:
        round: the round its state is of.
        client: the client.
    """
    return f"round{round:06d}-client{client:06d}.safetensors"


def anchor_file(round: int) -> str:
    """The name of the file with the global model that the clients of a round received.

    Args:
        round: the round.
    """
    return f"round{round:06d}-anchor.safetensors"
