"""The ClientApp: the local loop of core/client.py on a node of Flower."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fedlesam import algorithms
from fedlesam.algorithms import CATALOGUE, Algorithm
from fedlesam.core.batches import ClientData, check_client
from fedlesam.core.buffers import Unsupported
from fedlesam.core.checks import NotFinite, check_count
from fedlesam.core.client import drain, local_update
from fedlesam.core.computing import compute_context
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.local import LocalTraining
from fedlesam.core.messages import Memory
from fedlesam.core.task import Task
from fedlesam.engines.settings import find_device
from fedlesam.flower import records
from fedlesam.flower.memory import Memories

RAISED = 2
"""Flower's code for an exception of a ClientApp."""


def client_app(
    model: nn.Module | Callable[[Context], nn.Module],
    load_data: Callable[[Context], ClientData],
    local: LocalTraining | Callable[[Context], LocalTraining] | None = None,
    *,
    task: Task | None = None,
    algorithm: Algorithm | None = None,
    threads: int | None = None,
    mods: list[Any] | None = None,
) -> ClientApp:
    """A Flower ClientApp. The method and the seed come with the server's messages.

    `partition-id` of the node config is the client's number, from which its batches derive. `memory` of the node config
    is a folder in which the client's memory survives a restart of the SuperNode. `device` of the node config is where
    the client trains: auto (a GPU where there is one), cpu, cuda or cuda:i; without it, where the app puts the model.

    Args:
        model: the model, or a function that makes it from Flower's Context.
        load_data: makes the node's data from the Context, as a client of a Federation has them.
        local: how the client trains, or a function that makes it from the Context.
        task: how a batch becomes a loss; by default classification, with the loss of `local`.
        algorithm: the method, if it is not in the catalogue.
        threads: to compute with; None leaves the process's own number.
        mods: Flower's mods for training.
    """
    if threads is not None:
        check_count("client_app", "threads", threads)
    app = ClientApp()

    @app.query()
    def identify(message: Message, context: Context) -> Message:
        own = MetricRecord({"client": _client_number(context)})
        return Message(RecordDict({records.METRICS: own}), reply_to=message)

    @app.train(mods=mods or [])
    def train(message: Message, context: Context) -> Message:
        client = _client_number(context)
        module = model if isinstance(model, nn.Module) else model(context)
        module = module.to(_device_of(context)) if "device" in context.node_config else module
        training = local(context) if callable(local) else local or LocalTraining()
        flat, data = FlatModel(module), load_data(context)
        check_client(data, f"client {client}")
        order = records.read_order(message.content, flat)
        rules = _algorithm_of(order, algorithm).for_model(flat.tensors)
        memories = Memories(context.state, _folder_of(context), client)
        found = memories.find(order.used) if order.used else Memory()
        before, lost = found or Memory(), found is None
        with compute_context(threads, flat.device):
            steps = local_update(
                flat,
                data,
                rules,
                training,
                order.broadcast,
                before,
                client=client,
                seed=order.seed,
                task=training.task(task),
            )
            try:
                answer = drain(steps)
            except (NotFinite, Unsupported) as error:
                return Message(Error(RAISED, str(error)), reply_to=message)
        memories.keep(({order.used: before} if order.used and not lost else {}) | {order.ticket: answer.memory})
        shown = flat if order.as_model else None
        return Message(records.answer_content(answer, lost, order.broadcast.weights, shown), reply_to=message)

    return app


def _client_number(context: Context) -> int:
    """The client's number, to which its batches and its memory belong; Flower's node id may change."""
    found = context.node_config.get("partition-id")
    if isinstance(found, bool) or not isinstance(found, int) or found < 0:
        raise ValueError(
            f"partition-id of the node config must be a whole number from 0, got {found!r}; start the SuperNode with "
            '--node-config "partition-id=0"'
        )
    return found


def _device_of(context: Context) -> torch.device:
    try:
        return find_device(str(context.node_config["device"]))
    except ValueError as error:
        raise ValueError(f"node config: {error}") from error


def _folder_of(context: Context) -> Path | None:
    found = context.node_config.get("memory")
    if found is not None and not (isinstance(found, str) and Path(found).is_absolute()):
        raise ValueError(f"memory of the node config must be the full path of a folder, got {found!r}")
    return Path(found) if found is not None else None


def _algorithm_of(order: records.Order, own: Algorithm | None) -> Algorithm:
    """The method that the server runs. A message can name one of the catalogue; it cannot make a node import code."""
    runs = f"the server runs {order.algorithm}"
    if own is None and order.name not in CATALOGUE:
        raise ValueError(f"{runs}, not in the catalogue: give it to client_app(algorithm=...) too")
    rules = own if own is not None else algorithms.get(order.name, **order.hyper)
    if repr(rules) != order.algorithm:
        raise ValueError(f"{runs}, this app {rules!r}: install the same version on both")
    return rules
