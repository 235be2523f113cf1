"""The client states between rounds: in RAM up to a budget, beyond it in files.

A file of the store's own holds one client's state of one round and is never changed. The index says which file is
current, so a round is committed by changing the index. Clients that keep the received model itself (FedLESAM) share one
vector in RAM and one file on disk, the anchor's. What was loaded from a checkpoint stays in the checkpoint's segments,
mapped, until its client is active again.
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
from fedlesam.engines import segments
from fedlesam.engines.segments import Archive, Piece, Segment


class Store(Mapping[int, Memory]):
    """The state of every client that was ever active.

    Args:
        folder: for the states that are not in RAM. With budget 0 several processes can use one folder: the process
            that trained a client writes its file, and all commit the same rounds.
        budget: bytes that stay in RAM; None: all, 0: none.
    """

    def __init__(self, folder: Path | None = None, budget: int | None = None) -> None:
        if budget is not None and folder is None:
            raise ValueError("a memory budget needs a folder for what exceeds it")
        self.folder, self.budget = folder, budget
        self.rounds: dict[int, int] = {}
        """The index: client -> the round its state is of, those that changed last at the end."""
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
        self._loaded: dict[int, Segment] = {}
        """client -> the segment of a checkpoint that has its state."""
        self._saved: Archive | None = None
        """The last checkpoint."""
        self._ram = _ByteCount()
        """Kept where there is a budget."""

    def __getstate__(self) -> dict[str, Any]:
        """For a spawned process, which cannot be given weak references."""
        return {**vars(self), "anchors": dict(self.anchors), "_mapped": {}}

    def __setstate__(self, values: dict[str, Any]) -> None:
        weak = {name: WeakValueDictionary(values[name]) for name in ("anchors", "_mapped")}
        vars(self).update({**values, **weak})

    @property
    def nbytes(self) -> int:
        """Bytes in RAM; a vector that clients share counts once."""
        if self.budget is not None:
            return self._ram.nbytes
        found = _ByteCount()
        for memory in self._resident.values():
            found.add(memory)
        return found.nbytes

    def __getitem__(self, client: int) -> Memory:
        found = self._resident.get(client)
        return self._piece(client).memory if found is None else found

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
            full = self.nbytes + coming.nbytes > self.budget
            for client in [client for client, memory in self._resident.items() if memory] if full else ():
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
        unmapped = {self._loaded.pop(client).path for client in memories if client in self._loaded}
        shared = False
        for client, memory in memories.items():
            self._drop(client)
            if memory is not None:
                self._keep(client, memory)
                shared = shared or (bool(memory) and any(tensor is anchor for tensor in memory.tensors()))
            self.rounds.pop(client, None)
            self.rounds[client] = round
        if shared:
            self.anchors[round] = anchor
        self._clients[round] += len(memories)
        for _, before in old:
            self._clients[before] -= 1
        unused = self._uncommitted and self._uncommitted - {(round, client) for client in memories}
        self._uncommitted = set()
        self._unlink([*old, *((client, before) for before, client in unused)])
        if unmapped and self.folder is not None:
            for path in unmapped - {segment.path for segment in self._loaded.values()}:
                with contextlib.suppress(OSError):
                    path.unlink()

    def remembering(self) -> list[int]:
        """The clients whose state is not empty."""
        empty = {client for client, memory in self._resident.items() if not memory}
        empty |= {client for client, segment in self._loaded.items() if segment.is_empty(client)}
        return [client for client in self.rounds if client not in empty]

    def anchor(self, round: int) -> Tensor | None:
        """The global model that a round started from, if a client keeps it.

        Args:
            round: the round.
        """
        if round in self.anchors:
            return self.anchors[round]
        pieces = (self._piece(client) for client in self._loaded if self.rounds[client] == round)
        return next((piece.anchor for piece in pieces if piece.anchor is not None), None)

    def save(self, folder: Path, name: str, known: Mapping[str, disk.FileDigest]) -> dict[str, disk.FileDigest]:
        """Write what changed to a segment in a folder; the states there are lasting once the folder is synced.

        Args:
            folder: where the segments are.
            name: of the new one.
            known: the files of the last checkpoint there.

        Returns:
            The segments with the current states.
        """
        paths = {folder / file for file in known if segments.NAME.fullmatch(file)}
        saved, self._saved = self._saved, None  # if this fails, the next one looks again
        if saved is None or saved.paths != paths:
            saved = Archive(_readable(paths), self.rounds)
        if new := saved.choose(self.rounds):
            digest = segments.write(folder / name, new, self.rounds, self._piece)
            known = {**known, name: digest}
            saved.add(Segment(folder / name))
        self._saved = saved
        return {path.name: known[path.name] for path in sorted(saved.paths)}

    def load(self, folder: Path, names: Collection[str], clients: Collection[int] | None = None) -> None:
        """Replace all states by those in the segments of a folder.

        Args:
            folder: where the segments are.
            names: of the segments.
            clients: whose states; None: all of them.
        """
        self.clear()
        found = []
        for name in names:
            if self.folder is not None and not (self.folder / name).exists():
                disk.link(folder / name, self.folder / name, sync=False)
            found.append(Segment((self.folder or folder) / name))
        for client, segment in segments.newest(found).items():
            if clients is None or client in clients:
                self._loaded[client], self.rounds[client] = segment, segment.rounds[client]
        self._clients = Counter(self.rounds.values())

    def load_files(self, folder: Path, rounds: Mapping[int, int], empty: Collection[int]) -> None:
        """Replace all states by those of a checkpoint of an earlier version, which has a file for each client.

        Args:
            folder: where the files are.
            rounds: the new index.
            empty: the clients without a file, whose state is empty.
        """
        self.clear()
        self.rounds, self._clients = dict(rounds), Counter(rounds.values())
        for client, round in rounds.items():
            if client in empty:
                self._keep(client, Memory())
            elif self.folder is None:
                self._keep(client, self._read(client, round, folder).memory)
                if round in self._mapped:
                    self.anchors[round] = self._mapped[round]
            else:
                for name in (client_file(round, client), anchor_file(round)):
                    if (folder / name).exists() and not (self.folder / name).exists():
                        disk.link(folder / name, self.folder / name, sync=False)

    def clear(self) -> None:
        """Remove all states; files stay."""
        self.rounds, self._uncommitted = {}, set()
        self._saved = None
        for container in (self._clients, self._resident, self.anchors, self._mapped, self._loaded):
            container.clear()
        self._ram = _ByteCount()

    def _keep(self, client: int, memory: Memory) -> None:
        self._resident[client] = memory
        if self.budget is not None:
            self._ram.add(memory)

    def _drop(self, client: int) -> None:
        memory = self._resident.pop(client, None)
        if memory is not None and self.budget is not None:
            self._ram.remove(memory)

    def _unlink(self, old: list[tuple[int, int]]) -> None:
        """Delete files that the index does not name any more. One that stays does no harm; half a commit would."""
        unused = [round for round in {round for _, round in old} if not self._clients[round]]
        for round in unused:
            del self._clients[round]
        if self.folder is None:
            return
        names = [*(client_file(round, client) for client, round in old), *map(anchor_file, unused)]
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
        piece = _split(memory, anchor)
        if piece.anchor is not None and not exists:
            state.save(folder / anchor_file(round), {"anchor": piece.anchor}, sync=False)
        state.save(folder / client_file(round, client), piece.own, sync=False, anchor=piece.shared)

    def _piece(self, client: int) -> Piece:
        """A client's state, wherever it is."""
        round = self.rounds[client]
        if client in self._resident:
            return _split(self._resident[client], self.anchors.get(round))
        if client in self._loaded:
            return self._loaded[client].piece(client)
        assert self.folder is not None
        return self._read(client, round, self.folder)

    def _read(self, client: int, round: int, folder: Path) -> Piece:
        path = folder / client_file(round, client)
        try:
            tensors, metadata = state.load_small(path)
            shared, anchor = metadata.get("anchor") or [], None
            if shared:
                anchor = self._mapped.get(round)
                if anchor is None:
                    path = folder / anchor_file(round)
                    self._mapped[round] = anchor = state.load(path)[0]["anchor"]
            piece = Piece(tensors, shared, anchor)
            piece.memory  # noqa: B018 - refuses names of no slot
            return piece
        except state.UNREADABLE as error:
            raise disk.Damaged(one_line(f"{path}: the memory of client {client} cannot be read: {error}")) from error


def _readable(paths: Collection[Path]) -> list[Segment]:
    """Without those of other machines."""
    found = []
    for path in sorted(paths):
        with contextlib.suppress(disk.Damaged):
            found.append(Segment(path))
    return found


def _split(memory: Memory, anchor: Tensor | None) -> Piece:
    tensors = memory.flatten()
    shared = [name for name, tensor in tensors.items() if tensor is anchor]
    own = {name: tensor for name, tensor in tensors.items() if tensor is not anchor}
    return Piece(own, shared, anchor if shared else None)


class _ByteCount:
    """The bytes of several client states together; a vector that several share counts once."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._holders: Counter[int] = Counter()

    def add(self, memory: Memory) -> None:
        for tensor in memory.tensors():
            place = tensor.data_ptr()
            self._holders[place] += 1
            self.nbytes += tensor.nbytes if self._holders[place] == 1 else 0

    def remove(self, memory: Memory) -> None:
        for tensor in memory.tensors():
            place = tensor.data_ptr()
            self._holders[place] -= 1
            if not self._holders[place]:
                del self._holders[place]
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
