"""What clients remember between rounds: in RAM up to a budget, beyond it in files.

A file holds one client's memory of one round and is never changed; the index says which file is current, so that a
round is committed by changing the index. Clients that keep the received model itself (FedLESAM) share one vector in RAM
and one file on disk.
"""

import contextlib
import json
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedlesam.core import disk
from fedlesam.core.messages import Memory, unshare
from fedlesam.core.names import one_line
from fedlesam.core.slots import State
from fedlesam.core.space import cannot_write

SLOTS = ("perturbation", "correction")


class Tally:
    """How many bytes memories take together; a vector that several share counts once."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._holders: Counter[int] = Counter()

    def add(self, memory: Memory) -> None:
        for tensor in tensors(memory).values():
            self._holders[tensor.data_ptr()] += 1
            self.nbytes += tensor.nbytes if self._holders[tensor.data_ptr()] == 1 else 0

    def remove(self, memory: Memory) -> None:
        for tensor in tensors(memory).values():
            self._holders[tensor.data_ptr()] -= 1
            if not self._holders[tensor.data_ptr()]:
                del self._holders[tensor.data_ptr()]
                self.nbytes -= tensor.nbytes


class Store(Mapping[int, Memory]):
    """The memory of every client that was ever active.

    `budget` bytes stay in RAM (None: all of them, 0: none) and the rest goes to `folder`. With budget 0 several
    processes can use one folder: whoever trained a client writes its file, and all commit the same rounds.
    """

    def __init__(self, folder: Path | None = None, budget: int | None = None) -> None:
        if budget is not None and folder is None:
            raise ValueError("a memory budget needs a folder for what goes beyond it")
        self.folder, self.budget = folder, budget
        self.rounds: dict[int, int] = {}
        """The index: client -> the round its memory is of."""
        self.keepers: Counter[int] = Counter()
        """round -> how many clients' current memory is of it."""
        self.resident: OrderedDict[int, Memory] = OrderedDict()
        """What is in RAM, the longest inactive first."""
        self.anchors: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        """round -> the global model it started from, while a client in RAM keeps it."""
        self.mapped: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        """The same, from a file, while somebody uses it."""
        self.loose: set[tuple[int, int]] = set()
        """(round, client) of the files written for a round that is not committed yet."""
        self._ram = Tally()

    def __getstate__(self) -> dict[str, Any]:
        """For a process that is started afresh: all but the references that only count as long as somebody has them."""
        weak = {"anchors": dict(self.anchors), "mapped": {}}
        return {**vars(self), **weak}

    def __setstate__(self, state: dict[str, Any]) -> None:
        weak = {name: WeakValueDictionary(state[name]) for name in ("anchors", "mapped")}
        vars(self).update({**state, **weak})

    @property
    def nbytes(self) -> int:
        """In RAM; a vector that clients share counts once."""
        return self._ram.nbytes

    def __getitem__(self, client: int) -> Memory:
        if client in self.resident:
            return self.resident[client]
        return self._read(client, self.rounds[client])

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.rounds))

    def __len__(self) -> int:
        return len(self.rounds)

    def prepare(self, round: int, client: int, memory: Memory, anchor: Tensor) -> Memory | None:
        """Before a commit: with nothing kept in RAM, whoever trained the client writes its file; None stands for it."""
        if self.budget != 0 or not memory:
            return memory
        self._write_ahead(round, client, memory, anchor)
        return None

    def make_room(self, round: int, anchor: Tensor, new: dict[int, Memory | None]) -> None:
        """Before a commit, all of it that can fail: write what will not fit into RAM beside the `new` memories.

        The longest inactive go first; a new memory for which there is no room at all becomes None.
        """
        if self.budget is None:
            return
        old = {client: self.resident[client] for client in new if client in self.resident}
        coming = Tally()
        for memory in new.values():
            if memory is not None:
                coming.add(memory)
        try:
            for client in old:
                self._drop(client)
            for client in [client for client, memory in self.resident.items() if memory]:
                if self.nbytes + coming.nbytes <= self.budget:
                    break
                self._spill(client)
        finally:
            for client, memory in old.items():
                self._keep(client, memory)
        for client, fresh in new.items():
            if fresh and coming.nbytes > self.budget:
                self._write_ahead(round, client, fresh, anchor)
                coming.remove(fresh)
                new[client] = None

    def commit(self, round: int, anchor: Tensor, memories: Mapping[int, Memory | None]) -> None:
        """Make the memories of a round's clients current, all at once. None: it is in its file.

        Nothing is written here, so nothing can fail; `make_room` comes before.
        """
        gone = [(client, self.rounds[client]) for client in memories if client in self.rounds]
        for client, memory in memories.items():
            self._drop(client)
            if memory is not None:
                self._keep(client, memory)
                if any(tensor is anchor for tensor in tensors(memory).values()):
                    self.anchors[round] = anchor
            self.rounds[client] = round
        self.keepers.update({round: len(memories)})
        self.keepers.subtract(old for _, old in gone)
        left = self.loose - {(round, client) for client in memories}
        self.loose = set()
        self._collect([*gone, *((client, old) for old, client in left)])

    def save(self, folder: Path, known: Collection[str]) -> dict[str, disk.FileDigest]:
        """Put the current memories into a folder, lastingly; the digests of those that were not `known` to be there."""
        new = {}
        for client, round in self.rounds.items():
            name, shared = client_file(round, client), anchor_file(round)
            if name in known or (client in self.resident and not self.resident[client]):
                continue
            there = shared in known or shared in new  # a file that just lies there may have been torn by a power loss
            if client in self.resident:
                try:
                    self._write(folder, round, client, self.resident[client], self.anchors.get(round), there)
                except SafetensorError as error:  # a class that another process could not name
                    raise OSError(f"{folder / name}: {error}") from error
            else:
                assert self.folder is not None
                disk.link(self.folder / name, folder / name, sync=False)
                if not there and (self.folder / shared).exists():
                    disk.link(self.folder / shared, folder / shared, sync=False)
            new[name] = folder / name
            if not there and (folder / shared).exists():
                new[shared] = folder / shared
        disk.sync(new.values())
        return {name: disk.digest_of(path) for name, path in new.items()}

    def adopt(self, folder: Path, rounds: Mapping[int, int], empty: Collection[int]) -> None:
        """Begin with the memories that a folder has of these rounds, and forget all others."""
        self.know(rounds, empty)
        for client, round in rounds.items():
            if client in empty:
                continue
            if self.folder is None:
                self._keep(client, self._read(client, round, folder))
                if round in self.mapped:
                    self.anchors[round] = self.mapped[round]
                continue
            for name in (client_file(round, client), anchor_file(round)):
                if (folder / name).exists() and not (self.folder / name).exists():
                    disk.link(folder / name, self.folder / name, sync=False)

    def know(self, rounds: Mapping[int, int], empty: Collection[int]) -> None:
        """Begin with memories that lie in this store's folder, but for clients whose memory is empty."""
        self.forget()
        self.rounds, self.keepers = dict(rounds), Counter(rounds.values())
        for client in empty:
            self._keep(client, Memory())

    def forget(self) -> None:
        self.rounds, self.loose = {}, set()
        for kept in (self.keepers, self.resident, self.anchors, self.mapped):
            kept.clear()
        self._ram = Tally()

    def _keep(self, client: int, memory: Memory) -> None:
        self.resident[client] = memory
        self._ram.add(memory)

    def _drop(self, client: int) -> None:
        memory = self.resident.pop(client, None)
        if memory is not None:
            self._ram.remove(memory)

    def _spill(self, client: int) -> None:
        round = self.rounds[client]
        assert self.folder is not None
        self._write_beyond(self.folder, round, client, self.resident[client], self.anchors.get(round))
        self._drop(client)

    def _collect(self, gone: list[tuple[int, int]]) -> None:
        """Delete files that nothing names any more; one that stays behind does no harm, half a commit would."""
        names = []
        for client, round in gone:
            names.append(client_file(round, client))
            if not self.keepers[round]:
                del self.keepers[round]
                names.append(anchor_file(round))
        if self.folder is None:
            return
        for name in names:
            with contextlib.suppress(OSError):
                (self.folder / name).unlink()

    def _write_ahead(self, round: int, client: int, memory: Memory, anchor: Tensor) -> None:
        assert self.folder is not None
        self.loose.add((round, client))
        self._write_beyond(self.folder, round, client, memory, anchor)

    def _write_beyond(self, folder: Path, round: int, client: int, memory: Memory, anchor: Tensor | None) -> None:
        """What is beyond the budget, into the store's own folder."""
        try:
            self._write(folder, round, client, memory, anchor, (folder / anchor_file(round)).exists())
        except (OSError, SafetensorError) as error:
            instead = "keep more of it in RAM: a larger --memory, with one worker or --store pinned"
            what = f"the memory of client {client}"
            raise ValueError(cannot_write(what, folder, error, memory.nbytes, instead)) from error

    def _write(self, folder: Path, round: int, client: int, memory: Memory, anchor: Tensor | None, there: bool) -> None:
        """`there`: the anchor's file is."""
        own = {name: tensor for name, tensor in tensors(memory).items() if tensor is not anchor}
        shared = [name for name, tensor in tensors(memory).items() if tensor is anchor]
        if shared and anchor is not None and not there:
            _save({"anchor": anchor}, folder / anchor_file(round), {})
        _save(own, folder / client_file(round, client), {"anchor": json.dumps(shared)})

    def _read(self, client: int, round: int, folder: Path | None = None) -> Memory:
        folder = folder or self.folder
        assert folder is not None
        path = folder / client_file(round, client)
        try:
            own, about = _map(path)
            shared = json.loads(about.get("anchor", "[]"))
            if shared:
                anchor = self.mapped.get(round)
                if anchor is None:
                    path = folder / anchor_file(round)
                    self.mapped[round] = anchor = _map(path)[0]["anchor"]
                own |= dict.fromkeys(shared, anchor)
            parts: dict[str, State] = {slot: {} for slot in SLOTS}
            for name, tensor in own.items():
                slot, _, key = name.partition(".")
                parts[slot][key] = tensor
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise disk.Damaged(one_line(f"{path}: the memory of client {client} cannot be read: {error}")) from error
        return Memory(**parts)


def client_file(round: int, client: int) -> str:
    return f"round{round:06d}-client{client:06d}.safetensors"


def anchor_file(round: int) -> str:
    return f"round{round:06d}-anchor.safetensors"


def tensors(memory: Memory) -> State:
    return {f"{slot}.{name}": tensor for slot in SLOTS for name, tensor in getattr(memory, slot).items()}


def _map(path: Path) -> tuple[State, dict[str, str]]:
    """The tensors of a file, mapped, not read: pages come in when they are used."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def _save(state: State, path: Path, about: dict[str, str]) -> None:
    disk.write_tensors(path, unshare(state), about, sync=False)
