"""The SuperNodes: which client each of them is, and the exchange of messages with them."""

import time
from collections.abc import Mapping
from logging import WARNING

import httpx
from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log

from fedlesam.flower import records

POLL = 0.5
"""Seconds between two polls."""

IDENTIFY = 60.0
"""Seconds, at least, that a SuperNode has to answer which client it is."""

LATE = "no answer in time"


def exchange(grid: Grid, messages: Mapping[int, Message], timeout: float) -> tuple[dict[int, Message], dict[int, str]]:
    """Send messages and wait for the replies.

    Replies are pulled one by one. A reply that cannot be read then costs only itself: a pull of many would fail as a
    whole, after the SuperLink has marked all of them as delivered.

    Args:
        grid: Flower's.
        messages: by client.
        timeout: seconds.

    Returns:
        The replies, and the reason of each client without one.
    """
    pushed = list(grid.push_messages(list(messages.values()))) if messages else []
    whole = len(pushed) == len(messages)
    waiting = {client: sent for client, sent in zip(messages, pushed, strict=False) if sent and whole}
    replies: dict[int, Message] = {}
    missing = {client: "the message could not be sent" for client in messages if client not in waiting}
    deadline = time.monotonic() + timeout
    while waiting:
        for client, identity in list(waiting.items()):
            try:
                for reply in list(grid.pull_messages([identity]))[:1]:
                    replies[client] = reply
            except httpx.HTTPError:
                raise
            except Exception as error:
                missing[client] = f"the answer cannot be read: {error}"
            if client in replies or client in missing:
                del waiting[client]
        left = deadline - time.monotonic()
        if not waiting or left <= 0:
            break
        time.sleep(min(POLL, left))
    return replies, missing | dict.fromkeys(waiting, LATE)


class Nodes:
    """The SuperNode of each client.

    Args:
        clients: the number of clients.
        patience: seconds to wait for SuperNodes to connect.
    """

    def __init__(self, clients: int, patience: float) -> None:
        self.clients, self.patience = clients, patience
        self.of: dict[int, int] = {}
        """client -> Flower's node id."""
        self._claims: dict[int, int] = {}
        """node id -> the client that it says it is."""
        self._complete = False

    def wait(self, grid: Grid, drawn: list[int], minimum: int) -> dict[int, int]:
        """Wait for SuperNodes to connect: the first time for all clients, later for the minimum.

        Args:
            grid: Flower's.
            drawn: the clients of the round.
            minimum: how many of them are needed.

        Returns:
            The SuperNodes of the clients that are connected.
        """
        deadline = time.monotonic() + self.patience
        while True:
            connected = self._identify(grid)
            online = {client: node for client, node in self.of.items() if node in connected}
            ready = sum(client in online for client in drawn) >= minimum
            if (ready and self._complete) or len(online) == self.clients or time.monotonic() >= deadline:
                self._complete = True
                return online
            time.sleep(POLL)

    def _identify(self, grid: Grid) -> set[int]:
        """Ask new SuperNodes which client they are; all that are connected."""
        online = set(grid.get_node_ids())
        unknown = sorted(online - set(self._claims))
        queries = {node: Message(RecordDict(), dst_node_id=node, message_type=MessageType.QUERY) for node in unknown}
        replies, missing = exchange(grid, queries, max(self.patience, IDENTIFY))
        for node, reply in replies.items():
            try:
                self._claims[node] = self._client_of(reply)
            except ValueError as error:
                missing[node] = str(error)
        for node, reason in missing.items():
            log(WARNING, "node %d is not used: %s", node, reason)
        for node in sorted(online & set(self._claims)):
            client = self._claims[node]
            if self.of.get(client, node) not in online or client not in self.of:
                self.of[client] = node
            elif self.of[client] != node and node in unknown:
                log(WARNING, "node %d is not used: client %d is node %d", node, client, self.of[client])
        return online

    def _client_of(self, reply: Message) -> int:
        if reply.has_error():
            raise ValueError(reply.error.reason)
        client = dict(reply.content.metric_records).get(records.METRICS, {}).get("client")
        if type(client) is not int or not 0 <= client < self.clients:
            raise ValueError(f"it is client {client!r}, and there are clients 0 to {self.clients - 1}")
        return client
