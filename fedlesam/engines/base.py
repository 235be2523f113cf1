"""The protocol of an engine: it trains the active clients of a round, holds their states and evaluates the model."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from fedlesam.core.buffers import Unsupported
from fedlesam.core.checks import NotFinite
from fedlesam.core.disk import FileDigest
from fedlesam.core.evaluation import Evaluation
from fedlesam.core.messages import Broadcast
from fedlesam.core.reduction import Reduction
from fedlesam.engines.meeting import WorkerLost
from fedlesam.engines.store import client_file

LONGEST_REASON = 200
"""Characters of an error kept in a record."""

NOT_THE_CLIENTS = (WorkerLost, MemoryError, torch.OutOfMemoryError, Unsupported)
"""Faults of the machine or of the model. Dropping a client for one would make the results depend on chance."""


@dataclass
class Outcome:
    """The results of a round's clients, summed, and what they cost."""

    reduction: Reduction
    """The sums, and who is part of them."""
    dropped: dict[int, str] = field(default_factory=dict)
    """The clients that failed, with the reason."""
    backward_passes: int = 0
    """Of all clients together."""
    bytes_up: int = 0
    """What the clients that answered sent."""
    waited: float = 0.0
    """Seconds that were spent on other federations."""


@dataclass(frozen=True)
class Saved:
    """Client states that were written to a folder."""

    digests: dict[str, FileDigest]
    """The files that hold them: segments."""
    rounds: dict[int, int] | None = None
    """client -> the round its state is of, in a checkpoint of an earlier version: each client has a file there."""

    @property
    def empty(self) -> set[int]:
        """The clients of an earlier version's checkpoint whose state is empty: they have no file."""
        return {c for c, round in (self.rounds or {}).items() if client_file(round, c) not in self.digests}


class Engine(Protocol):
    """What `Federation` calls. A round is `train`, perhaps `evaluate`, then `commit`; on an error nothing changes."""

    def train(self, broadcast: Broadcast, active: Sequence[int]) -> Outcome:
        """Train clients and hold their new states back until `commit`.

        Args:
            broadcast: what the server sends to each of them.
            active: the clients.
        """

    def evaluate(self, broadcast: Broadcast) -> Evaluation | None:
        """Evaluate a global model on the test data; None without test data.

        Args:
            broadcast: the model, as it would be sent.
        """

    def commit(self) -> None:
        """Make the client states of the last trained round current, all at once."""

    def save(self, folder: Path, round: int, known: Mapping[str, FileDigest]) -> Saved:
        """Write what changed of the client states to a folder; they survive a power loss once the folder is synced.

        Args:
            folder: where the files go.
            round: rounds done.
            known: the files of the last checkpoint there; what is in them is not written again.
        """

    def load_states(self, folder: Path, saved: Saved) -> None:
        """Replace the current client states by saved ones.

        Args:
            folder: where the files are.
            saved: the files that hold them, with their digests.

        Raises:
            Damaged: a file is missing or is not the one that was saved.
        """

    def collect(self, folder: Path, named: Collection[str]) -> None:
        """Delete files of client states.

        Args:
            folder: where the files are.
            named: the files to keep.
        """

    def close(self) -> None:
        """End the processes that the engine uses."""


def is_client_error(error: Exception) -> bool:
    """Whether a client may be dropped for an error. Out of RAM, PyTorch raises a plain RuntimeError.

    Args:
        error: what training the client raised.
    """
    return not isinstance(error, NOT_THE_CLIENTS) and "can't allocate memory" not in str(error)


def reason(error: Exception) -> str:
    """The first line of an error, as a record holds it.

    Args:
        error: what training a client raised.
    """
    what = error.what if isinstance(error, NotFinite) else f"{type(error).__name__}: {error}"
    return what.splitlines()[0][:LONGEST_REASON]
