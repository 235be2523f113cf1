"""What clients remember between rounds: in RAM up to a budget, beyond it in files.

A file holds one client's memory of one round and is never changed; the index says which file is current, so that a
round is committed by changing the index. Clients that keep the received model itself (FedLESAM) share one vector in RAM
and one file on disk.
"""

import json
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from weakref import WeakValueDictionary

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedlesam.messages import Memory
from fedlesam.rules.base import State

SLOTS = ("perturbation", "correction")


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
        self.nbytes = 0
        """In RAM; a vector that clients share counts once."""
        self._holders: Counter[int] = Counter()

    def __getitem__(self, client: int) -> Memory:
        if client in self.resident:
            return self.resident[client]
        return self._read(client, self.rounds[client])

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.rounds))

    def __len__(self) -> int:
        return len(self.rounds)

    def prepare(self, round: int, client: int, memory: Memory, anchor: Tensor) -> None:
        """Before a commit: with nothing kept in RAM, the file is written by whoever trained the client."""
        if self.budget == 0:
            self._write(round, client, memory, anchor)

    def commit(self, round: int, anchor: Tensor, memories: Mapping[int, Memory | None]) -> None:
        """Make the memories of a round's clients current, all at once. None: it is in its file."""
        gone = [(client, self.rounds[client]) for client in memories if client in self.rounds]
        for client, memory in memories.items():
            self._drop(client)
            if memory is not None and self.budget != 0:
                self._keep(client, memory)
                if any(tensor is anchor for tensor in tensors(memory).values()):
                    self.anchors[round] = anchor
            self.rounds[client] = round
        self.keepers.update({round: len(memories)})
        self.keepers.subtract(old for _, old in gone)
        while self.budget is not None and self.nbytes > self.budget:
            self._spill(next(iter(self.resident)))
        self._collect(gone)

    def _keep(self, client: int, memory: Memory) -> None:
        self.resident[client] = memory
        for tensor in tensors(memory).values():
            self._holders[tensor.data_ptr()] += 1
            self.nbytes += tensor.nbytes if self._holders[tensor.data_ptr()] == 1 else 0

    def _drop(self, client: int) -> None:
        memory = self.resident.pop(client, None)
        for tensor in tensors(memory).values() if memory is not None else ():
            self._holders[tensor.data_ptr()] -= 1
            if not self._holders[tensor.data_ptr()]:
                del self._holders[tensor.data_ptr()]
                self.nbytes -= tensor.nbytes

    def _spill(self, client: int) -> None:
        round = self.rounds[client]
        self._write(round, client, self.resident[client], self.anchors.get(round))
        self._drop(client)

    def _collect(self, gone: list[tuple[int, int]]) -> None:
        """Delete files that nothing names any more."""
        for client, round in gone if self.folder is not None else ():
            self._path(round, client).unlink(missing_ok=True)
            if not self.keepers[round]:
                del self.keepers[round]
                self._anchor_path(round).unlink(missing_ok=True)

    def _path(self, round: int, client: int) -> Path:
        assert self.folder is not None
        return self.folder / f"round{round:06d}-client{client:06d}.safetensors"

    def _anchor_path(self, round: int) -> Path:
        assert self.folder is not None
        return self.folder / f"round{round:06d}-anchor.safetensors"

    def _write(self, round: int, client: int, memory: Memory, anchor: Tensor | None) -> None:
        own = {name: tensor for name, tensor in tensors(memory).items() if tensor is not anchor}
        shared = [name for name, tensor in tensors(memory).items() if tensor is anchor]
        if shared and anchor is not None:
            _save({"anchor": anchor}, self._anchor_path(round), {}, once=True)
        _save(own, self._path(round, client), {"anchor": json.dumps(shared)})

    def _read(self, client: int, round: int) -> Memory:
        path = self._path(round, client)
        try:
            own, about = _map(path)
            shared = json.loads(about.get("anchor", "[]"))
            if shared:
                anchor = self.mapped.get(round)
                if anchor is None:
                    self.mapped[round] = anchor = _map(self._anchor_path(round))[0]["anchor"]
                own |= dict.fromkeys(shared, anchor)
        except (OSError, SafetensorError, ValueError) as error:
            raise ValueError(f"{path}: the memory of client {client} cannot be read: {error}") from error
        parts: dict[str, State] = {slot: {} for slot in SLOTS}
        for name, tensor in own.items():
            slot, _, key = name.partition(".")
            parts[slot][key] = tensor
        return Memory(**parts)


def tensors(memory: Memory) -> State:
    return {f"{slot}.{name}": tensor for slot in SLOTS for name, tensor in getattr(memory, slot).items()}


def _map(path: Path) -> tuple[State, dict[str, str]]:
    """The tensors of a file, mapped, not read: pages come in when they are used."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def _save(state: State, path: Path, about: dict[str, str], once: bool = False) -> None:
    if once and path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.part")
    try:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, beside, metadata=about)
        beside.replace(path)
    except (OSError, SafetensorError) as error:
        beside.unlink(missing_ok=True)
        raise ValueError(
            f"{path}: a client's memory cannot be written: {error}; free some space, or raise --memory"
        ) from error
