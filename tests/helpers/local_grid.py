"""Flower without its processes: the same Message objects, serialised as on the wire, and a Context for every node."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import context_from_proto, context_to_proto, message_from_proto, message_to_proto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

Meddle = Callable[[Message], Message | None]
"""Between a node and the server: another reply, or None for one that is lost."""


@dataclass
class Node:
    app: ClientApp
    context: Context
    seen: list[Message] = field(default_factory=list)
    replied: list[Message] = field(default_factory=list)

    def handle(self, message: Message) -> Message:
        """As Flower's process does: context in, context and reply out; an exception is an error reply."""
        message = message_from_proto(message_to_proto(message))
        context = context_from_proto(context_to_proto(self.context))
        try:
            reply = self.app(message, context)
        except Exception as error:
            return Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)
        self.context = context_from_proto(context_to_proto(context))
        self.seen.append(message)
        self.replied.append(reply)
        return reply


class LocalGrid(Grid):
    def __init__(self, app: ClientApp, clients: int, run_config: dict[str, Any] | None = None, **node_config: Any):
        self.app, self.run_config, self.node_config = app, run_config or {}, node_config
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.nodes: dict[int, Node] = {}
        for client in range(clients):
            self.join(1000 + 7 * client, client)
        self.offline: set[int] = set()
        self.meddle: dict[int, Meddle] = {}
        """By client; for training only."""
        self.replies: dict[str, Message] = {}
        self.count = 0

    def join(self, node: int, client: Any) -> Node:
        config = {"partition-id": client, **self.node_config}
        if client is None:
            del config["partition-id"]
        self.nodes[node] = Node(self.app, Context(1, node, config, RecordDict(), self.run_config))
        return self.nodes[node]

    def of(self, client: int) -> Node:
        return next(node for node in self.nodes.values() if node.context.node_config.get("partition-id") == client)

    def leave(self, client: int) -> None:
        self.nodes = {key: node for key, node in self.nodes.items() if node is not self.of(client)}

    def new_run(self) -> None:
        """A ServerApp that is started again is another run: Flower gives every node an empty Context.state."""
        for node in self.nodes.values():
            node.context.state = RecordDict()

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in self.nodes if node not in self.offline]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        identities = []
        for message in messages:
            self.count += 1
            message.metadata.__dict__["_message_id"] = f"m{self.count}"
            identities.append(f"m{self.count}")
            node = self.nodes[message.metadata.dst_node_id]
            reply: Message | None = node.handle(message)
            client = node.context.node_config.get("partition-id")
            if message.metadata.message_type == "train" and client in self.meddle:
                assert reply is not None
                reply = self.meddle[client](copy.deepcopy(reply))
            if reply is not None:
                self.replies[f"m{self.count}"] = message_from_proto(message_to_proto(reply))
        return identities

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(identity) for identity in message_ids if identity in self.replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError
