"""The states of many clients in one file: what a checkpoint adds to those before it.

A segment is a safetensors file that is never changed. Clients whose states have the same form are a group: of group 0,
`0/clients` and `0/rounds` say whose states they are, and a tensor such as `0/correction/c` has a row for each. A vector
that all clients of a round share, the received model, is there once, as `anchor/<round>`; the metadata says for which
names of a group it stands.
"""

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedlesam.core import disk, state
from fedlesam.core.messages import Memory
from fedlesam.core.names import one_line
from fedlesam.core.slots import State

NAME = re.compile(r"round(\d{6,})-segment\d+\.safetensors")

MOST = 256
"""Segments of a checkpoint; with more the smallest are put together."""

HELD, HELD_BYTES = 16_384, 1 << 26
"""States of clients held at once while a segment is written, and their bytes.

Those in large files are mapped, and maps are limited; those in small ones are read. The others are read once more.
"""

ENTRY = 16
"""Bytes that say whose state a row is."""


class Piece(NamedTuple):
    """A client's state as a file holds it."""

    own: State
    """Tensors that are in the file, by name."""
    shared: list[str]
    """The names for which the anchor stands."""
    anchor: Tensor | None
    """The global model of the round; None where no name needs it."""

    @property
    def memory(self) -> Memory:
        """The state."""
        return Memory.unflatten({**self.own, **{name: self.anchor for name in self.shared if self.anchor is not None}})


@dataclass
class _Group:
    """Clients whose states have the same form."""

    shared: list[str]
    rows: dict[str, Tensor]
    clients: list[int]
    rounds: list[int]

    @property
    def nbytes(self) -> int:
        """Of one client."""
        return ENTRY + sum(rows[0].nbytes for rows in self.rows.values())


class Segment:
    """A segment's file, mapped: a row is read when it is used.

    Args:
        path: the file.

    Raises:
        Damaged: it is not a segment.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._tensors, metadata = state.load(path)
            names = [name for name in self._tensors if name.startswith("anchor/")]
            self._anchors = {int(name.removeprefix("anchor/")): self._tensors[name] for name in names}
            self._groups = [self._group(number, shared) for number, shared in enumerate(metadata["shared"])]
            self._places = {client: (group, row) for group in self._groups for row, client in enumerate(group.clients)}
            self.rounds = {
                client: round for g in self._groups for client, round in zip(g.clients, g.rounds, strict=True)
            }
            """client -> the round its state is of."""
            self._check()
        except state.UNREADABLE as error:
            raise disk.Damaged(one_line(f"{path}: is damaged: {error}")) from error
        self._users = Counter(round for group in self._groups if group.shared for round in group.rounds)
        """round -> the clients that use its anchor."""
        self._sizes = {id(group): group.nbytes for group in self._groups}
        self.nbytes = sum(len(group.clients) * self._sizes[id(group)] for group in self._groups)
        self.nbytes += sum(self._anchors[round].nbytes for round in self._users)
        self.live = self.nbytes
        """Bytes of the states that are still current."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Segment, (self.path,)

    def _group(self, number: int, shared: list[str]) -> _Group:
        prefix = f"{number}/"
        rows = {name.removeprefix(prefix): t for name, t in self._tensors.items() if name.startswith(prefix)}
        clients, rounds = (rows.pop(name) for name in ("clients", "rounds"))
        if any(len(tensor) != len(clients) for tensor in (rounds, *rows.values())) or not len(clients):
            raise ValueError("it does not have one row for each client")
        return _Group(shared, rows, clients.tolist(), rounds.tolist())

    def _check(self) -> None:
        for group in self._groups:
            if not all(type(number) is int and number >= 0 for number in (*group.clients, *group.rounds)):
                raise ValueError("its clients are not numbers")
            if group.shared and not self._anchors.keys() >= set(group.rounds):
                raise ValueError("it lacks a model that clients share")
            self.piece(group.clients[0]).memory  # noqa: B018 - refuses names of no slot
        if len(self._places) != sum(len(group.clients) for group in self._groups):
            raise ValueError("it has a client twice")

    def piece(self, client: int) -> Piece:
        """A client's state.

        Args:
            client: one of `rounds`.
        """
        group, row = self._places[client]
        own = {name: rows[row] for name, rows in group.rows.items()}
        return Piece(own, group.shared, self._anchors[group.rounds[row]] if group.shared else None)

    def is_empty(self, client: int) -> bool:
        """Whether there is nothing in a client's state.

        Args:
            client: one of `rounds`.
        """
        group, _ = self._places[client]
        return not group.rows and not group.shared

    def lose(self, client: int) -> None:
        """Note that a client's state is not current any more.

        Args:
            client: one of `rounds`.
        """
        group, row = self._places[client]
        self.live -= self._sizes[id(group)]
        if group.shared:
            round = group.rounds[row]
            self._users[round] -= 1
            if not self._users[round]:
                self.live -= self._anchors[round].nbytes


def segment_file(round: int, part: int) -> str:
    """The name of a segment.

    Args:
        round: rounds done.
        part: the number of the process that writes it.
    """
    return f"round{round:06d}-segment{part}.safetensors"


def newest(segments: Iterable[Segment]) -> dict[int, Segment]:
    """For each client the segment with its state of the latest round.

    Args:
        segments: of one checkpoint.
    """
    found: dict[int, Segment] = {}
    for segment in segments:
        for client, round in segment.rounds.items():
            if client not in found or found[client].rounds[client] < round:
                found[client] = segment
    return found


class Archive:
    """The segments of the last checkpoint in a folder, and where in them each client's current state is.

    Args:
        segments: of the checkpoint.
        rounds: client -> the round its current state is of.
    """

    def __init__(self, segments: Iterable[Segment], rounds: Mapping[int, int]) -> None:
        self.segments, self._where = list(segments), newest(segments)
        for segment in self.segments:
            for client, round in segment.rounds.items():
                if self._where[client] is not segment or rounds.get(client) != round:
                    segment.lose(client)
        self._where = {c: s for c, s in self._where.items() if rounds.get(c) == s.rounds[c]}

    @property
    def paths(self) -> set[Path]:
        """Of the segments."""
        return {segment.path for segment in self.segments}

    def choose(self, rounds: dict[int, int]) -> list[int]:
        """The clients that the next checkpoint writes: those that changed, and those in segments that go.

        A segment goes when more than half of it is dead; with too many segments, the smaller half of them goes.

        Args:
            rounds: client -> the round its state is of, those that changed last at the end.
        """
        new = list(itertools.takewhile(lambda client: not self._has(client, rounds[client]), reversed(rounds)))
        for client in new:
            if client in self._where:
                self._where.pop(client).lose(client)
        stay = sorted((s for s in self.segments if s.nbytes <= 2 * s.live), key=lambda segment: -segment.live)
        stay = stay if len(stay) < MOST else stay[: MOST // 2]
        gone = [segment for segment in self.segments if segment not in stay]
        moved = [client for segment in gone for client in segment.rounds if self._where.get(client) is segment]
        self.segments = stay
        return sorted(new + moved)

    def add(self, segment: Segment) -> None:
        """Take up what was written.

        Args:
            segment: of the clients that `choose` returned.
        """
        self.segments.append(segment)
        self._where |= dict.fromkeys(segment.rounds, segment)

    def _has(self, client: int, round: int) -> bool:
        return client in self._where and self._where[client].rounds[client] == round


def write(
    path: Path, clients: Collection[int], rounds: Mapping[int, int], read: Callable[[int], Piece]
) -> disk.FileDigest:
    """Write a segment, one client's state after the other; it survives a power loss once its folder is synced.

    Args:
        path: the file.
        clients: whose states.
        rounds: client -> the round its state is of.
        read: the state of a client.
    """
    groups: dict[Any, list[int]] = defaultdict(list)
    anchors: dict[int, Tensor] = {}
    held: dict[int, Piece] = {}
    nbytes = 0
    for client in clients:
        piece = read(client)
        if len(held) < HELD and nbytes < HELD_BYTES:
            held[client] = piece
            nbytes += state.size_in_bytes(piece.own)
        forms = tuple((name, tensor.dtype, tensor.shape) for name, tensor in piece.own.items())
        groups[forms, tuple(piece.shared)].append(client)
        if piece.anchor is not None:
            anchors[rounds[client]] = piece.anchor
    tensors: dict[str, state.Rows] = {f"anchor/{round}": state.Rows.of(tensor) for round, tensor in anchors.items()}
    for number, ((forms, _), members) in enumerate(groups.items()):
        tensors[f"{number}/clients"] = state.Rows.of(torch.tensor(members))
        tensors[f"{number}/rounds"] = state.Rows.of(torch.tensor([rounds[client] for client in members]))
        for name, dtype, shape in forms:
            tensors[f"{number}/{name}"] = state.Rows((len(members), *shape), dtype, _rows(members, name, held, read))
    return state.save_rows(path, tensors, sync="file", shared=[list(shared) for _, shared in groups])


def _rows(clients: list[int], name: str, held: Mapping[int, Piece], read: Callable[[int], Piece]) -> Iterator[Tensor]:
    for client in clients:
        yield (held.get(client) or read(client)).own[name]
