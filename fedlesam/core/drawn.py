"""Very many clients: their data are checked when a client is drawn, and may be made then."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedlesam.core.batches import ClientData, size_of
from fedlesam.core.sound import check_samples

MOST = 10_000
"""Clients of a list that are all checked before the first round."""


def check_clients(clients: Any) -> None:
    """A ValueError for what is no sequence of clients.

    Args:
        clients: What was given.
    """
    if isinstance(clients, Mapping):
        raise ValueError("clients must be a list with an entry for each, got a dict; use list(clients.values())")
    if not (hasattr(clients, "__len__") and hasattr(clients, "__getitem__")):
        raise ValueError(f"clients must be a list with an entry for each, got {clients!r}; use list(clients)")
    if len(clients) == 0:
        raise ValueError("there are no clients")


def is_checked_whole(clients: Sequence[ClientData | None]) -> bool:
    """Whether all clients are looked at before the first round; another sequence than a list may make its items.

    Args:
        clients: The data of all clients, or their test data.
    """
    return isinstance(clients, list | tuple) and len(clients) <= MOST


class DrawnClients(Sequence[ClientData]):
    """Clients that are checked when they are drawn for the first time.

    Args:
        clients: any sequence; an item may be made when it is asked for.
        first: the data of client 0, whose form the others must have.
        drop: whether a client with numbers that are not finite may stay.
        check_targets: refuses clients by number whose targets the loss does not take.
    """

    def __init__(
        self,
        clients: Sequence[ClientData],
        first: ClientData,
        drop: bool,
        check_targets: Callable[[Mapping[int, ClientData]], None],
    ) -> None:
        self.clients, self.first, self.drop, self.check_targets = clients, first, drop, check_targets
        self.sizes: dict[int, int] = {}
        """Samples of the clients that were drawn."""

    def __len__(self) -> int:
        return len(self.clients)

    def __getitem__(self, client: Any) -> Any:
        data = self.clients[client]
        if client not in self.sizes:
            check_samples({0: self.first, client: data}, {}, drop=self.drop)
            self.check_targets({client: data})
            self.sizes[client] = size_of(data)
        return data


def known_size(clients: Sequence[ClientData], client: int) -> int | None:
    """The number of samples of a client; None where that is known only once it has been drawn.

    Args:
        clients: The data of all clients.
        client: The number of one.
    """
    return clients.sizes.get(client) if isinstance(clients, DrawnClients) else size_of(clients[client])
