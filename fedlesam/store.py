"""What clients remember between rounds: in RAM up to a budget, beyond it in files.

A file holds one client's memory of one round and is never changed; the index says which file is current, so that a
round is committed by changing the index. Clients that keep the received model itself (FedLESAM) share one vector in RAM
and one file on disk.
"""

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path

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
        self.resident: OrderedDict[int, Memory] = OrderedDict()
        """What is in RAM, the longest inactive first."""
        self.anchors: dict[int, Tensor] = {}
        """round -> the global model it started from, while a client in RAM keeps it."""
        self.mapped: dict[Path, State] = {}

    def __getitem__(self, client: int) -> Memory:
        if client in self.resident:
            return self.resident[client]
        return self._read(client, self.rounds[client])

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.rounds))

    def __len__(self) -> int:
        return len(self.rounds)

    @property
    def nbytes(self) -> int:
        """In RAM; a vector that clients share counts once."""
        return sum(
            {t.data_ptr(): t.nbytes for memory in self.resident.values() for t in tensors(memory).values()}.values()
        )

    def prepare(self, round: int, client: int, memory: Memory, anchor: Tensor) -> None:
        """Before a commit: with nothing kept in RAM, the file is written by whoever trained the client."""
        if self.budget == 0:
            self._write(round, client, memory, anchor)

    def commit(self, round: int, anchor: Tensor, memories: Mapping[int, Memory | None]) -> None:
        """Make the memories of a round's clients current, all at once. None: it is in its file."""
        gone = {(client, self.rounds[client]) for client in memories if client in self.rounds}
        for client, memory in memories.items():
            self.rounds[client] = round
            self.resident.pop(client, None)
            if memory is not None and self.budget != 0:
                self.resident[client] = memory
                if _keeps(memory, anchor):
                    self.anchors[round] = anchor
        self._spill()
        self._collect(gone)

    def _spill(self) -> None:
        while self.budget is not None and self.resident and self.nbytes > self.budget:
            client = next(iter(self.resident))
            round = self.rounds[client]
            self._write(round, client, self.resident[client], self.anchors.get(round))
            del self.resident[client]
        used = {self.rounds[client] for client in self.resident}
        self.anchors = {round: anchor for round, anchor in self.anchors.items() if round in used}

    def _collect(self, gone: set[tuple[int, int]]) -> None:
        """Delete files that nothing names any more."""
        if self.folder is None:
            return
        for client, round in gone:
            self._path(round, client).unlink(missing_ok=True)
        current = set(self.rounds.values())
        for round in {round for _, round in gone} - current:
            path = self._anchor_path(round)
            self.mapped.pop(path, None)
            path.unlink(missing_ok=True)

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
                whole = self._anchor_path(round)
                if whole not in self.mapped:
                    self.mapped[whole] = _map(whole)[0]
                own |= dict.fromkeys(shared, self.mapped[whole]["anchor"])
        except (OSError, SafetensorError, ValueError) as error:
            raise ValueError(f"{path}: the memory of client {client} cannot be read: {error}") from error
        parts: dict[str, State] = {slot: {} for slot in SLOTS}
        for name, tensor in own.items():
            slot, _, key = name.partition(".")
            parts[slot][key] = tensor
        return Memory(**parts)


def tensors(memory: Memory) -> State:
    return {f"{slot}.{name}": tensor for slot in SLOTS for name, tensor in getattr(memory, slot).items()}


def _keeps(memory: Memory, anchor: Tensor) -> bool:
    return any(tensor is anchor for tensor in tensors(memory).values())


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
