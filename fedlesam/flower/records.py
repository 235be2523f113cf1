"""The messages between server and clients as Flower's records. No pickle: bytes with a name, a dtype and a shape.

Messages from the network are checked here before anything is computed with them; an invalid one is a ValueError.
"""

import io
import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor, nn

from fedlesam.core.buffers import AVERAGED
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.messages import Broadcast, ClientResult, Memory
from fedlesam.core.slots import Algorithm, LocalResult, State
from fedlesam.core.state import unflatten

RAW = "fedlesam.raw"
"""Serialisation of an Array: its entries in order, little-endian, as `Record.bytes_up` counts them."""

NUMPY = "numpy.ndarray"
"""Flower's own serialisation, which its mods need: a .npy file with a header of 128 bytes."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (*AVERAGED, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64)
}

ARRAYS, CONFIG, METRICS = "arrays", "config", "metrics"
"""The records of a message, one of each kind, as Flower's mods expect."""

TICKET = re.compile(r"[0-9a-f]{32}")


def array(tensor: Tensor) -> Array:
    """A tensor as Flower's Array.

    Args:
        tensor: on any device.
    """
    if sys.byteorder != "little":
        raise ValueError("this machine is big-endian, and the messages are little-endian")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return Array(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), RAW, data)


def tensor(array: Array) -> Tensor:
    """The tensor of an Array. Lengths are compared before memory is allocated, since the shape may be forged.

    Args:
        array: from the network.
    """
    dtype, shape, data = DTYPES.get(array.dtype), tuple(array.shape), array.data
    if dtype is None:
        raise ValueError(f"dtype {array.dtype!r} is not one of {', '.join(DTYPES)}")
    if array.stype == NUMPY:
        shape, data = _npy(array)
    elif array.stype != RAW:
        raise ValueError(f"serialisation {array.stype!r} is neither {RAW!r} nor {NUMPY!r}")
    if any(size < 0 for size in shape) or len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are not {shape} of {array.dtype}")
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


def _npy(array: Array) -> tuple[tuple[int, ...], bytes]:
    """Shape and data of a .npy file; numpy.load would allocate what a forged header asks for."""
    file = io.BytesIO(array.data)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("a .npy of another version than 1.0")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if fortran or str(dtype) != array.dtype or shape != tuple(array.shape):
        raise ValueError(f"a .npy of {shape} {dtype} is not the {tuple(array.shape)} {array.dtype} it is said to be")
    return shape, array.data[file.tell() :]


def arrays(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Named tensors as an ArrayRecord.

    Args:
        tensors: a flat dict (core/state.py).
    """
    return ArrayRecord({name: array(value) for name, value in tensors.items()})


def tensors(record: Mapping[str, Array]) -> State:
    """The named tensors of an ArrayRecord.

    Args:
        record: from the network.
    """
    found = {}
    for name, value in record.items():
        try:
            found[name] = tensor(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return found


def state_dict(model: FlatModel, weights: Tensor) -> ArrayRecord:
    """Weights as a state dict in Flower's own serialisation, which its mods need.

    Args:
        model: has the names and shapes.
        weights: a flat vector.
    """
    views = zip(model.names, model.views(weights), strict=True)
    return ArrayRecord({name: Array(view.detach().cpu().numpy()) for name, view in views})


def check_state(module: nn.Module) -> None:
    """Refuse a model with tensors that NumPy, and so an ArrayRecord, cannot hold.

    Args:
        module: the model.
    """
    for name, value in module.state_dict().items():
        try:
            (torch.empty(0, dtype=value.dtype) if value.layout is torch.strided else value).numpy()
        except (AttributeError, TypeError) as error:
            raise ValueError(
                f"{name} of the model cannot be put into Flower's arrays ({error}); use another dtype, or register the "
                "buffer with persistent=False"
            ) from error


def payload(content: RecordDict) -> int:
    """The bytes of all arrays of a message, without names and numbers.

    Args:
        content: the message.
    """
    return sum(len(value.data) for record in content.array_records.values() for value in record.values())


@dataclass(frozen=True)
class Order:
    """What the server asks of one client in one round."""

    broadcast: Broadcast
    """The global model and what the rules send with it."""
    ticket: str
    """Identifies this attempt at the round, and the memory that the client will have after it."""
    used: str
    """The ticket of the client's last answer that the server used; empty if there is none."""
    seed: int
    """Of the run."""
    algorithm: str
    """The `repr` of the method that the client must run."""
    name: str = ""
    """The method's name in the catalogue; empty for a custom method, which both apps must have."""
    hyper: Mapping[str, Any] = field(default_factory=dict)
    """The method's hyper-parameters, where it has a name."""
    as_model: bool = False
    """Whether the answer is the client's model under the names of the received one, for Flower's privacy mods."""


SENT = {"ticket": str, "used": str, "seed": int, "algorithm": str, "name": str, "as_model": bool}
"""The fields of an order that are sent as they are, under their own names."""


def order_content(order: Order, broadcast: ArrayRecord, config: Mapping[str, Any]) -> RecordDict:
    """The message for one client.

    Args:
        order: its numbers.
        broadcast: its arrays, the same for all clients of a round.
        config: the user's, sent with it.
    """
    values = {name.replace("_", "-"): getattr(order, name) for name in SENT}
    values |= {"round": order.broadcast.round, "hyper": json.dumps(dict(order.hyper))}
    return RecordDict({ARRAYS: broadcast, CONFIG: ConfigRecord({**config, **values})})


def read_order(content: RecordDict, model: FlatModel) -> Order:
    """The order of a message.

    Args:
        content: the message.
        model: the client's, which must be like the server's.
    """
    config = _record(content.config_records, CONFIG)
    named = tensors(_record(content.array_records, ARRAYS))
    sent = {name: _value(config, name.replace("_", "-"), kind) for name, kind in SENT.items()}
    if sent["as_model"]:
        if list(named) != model.names:
            raise ValueError(f"the server's model has the parameters {list(named)}, this app's has {model.names}")
        named = {"weights": torch.cat([value.reshape(-1) for value in named.values()])}
    weights = named.get("weights")
    if weights is None or weights.shape != model.weights.shape or weights.dtype != model.weights.dtype:
        is_there = "none" if weights is None else f"{tuple(weights.shape)} of {weights.dtype}"
        raise ValueError(
            f"the server's model has {is_there} as its weights, this app's has {tuple(model.weights.shape)} of "
            f"{model.weights.dtype}: both apps must make the same model"
        )
    named = {name: value.to(model.device) for name, value in named.items()}
    broadcast = Broadcast.unflatten(_value(config, "round", int), named)
    buffers = {name: (value.shape, value.dtype) for name, value in broadcast.buffers.items()}
    own = {name: model.state.forms[name] for name in model.state.names}
    if buffers != own and not sent["as_model"]:
        wrong = ", ".join(sorted(name for name in {**buffers, **own} if buffers.get(name) != own.get(name)))
        raise ValueError(f"the server's model has other buffers ({wrong}): both apps must make the same model")
    ticket, used = sent["ticket"], sent["used"]
    if not TICKET.fullmatch(ticket) or (used and not TICKET.fullmatch(used)):
        raise ValueError(f"a ticket must be 32 hexadecimal digits, got {ticket!r} and {used!r}")
    return Order(broadcast, hyper=json.loads(_value(config, "hyper", str)), **sent)


def answer_content(answer: ClientResult, lost: bool, anchor: Tensor, model: FlatModel | None) -> RecordDict:
    """The message with a client's answer.

    Args:
        answer: the result of its round; the memory is not sent.
        lost: whether the client had lost its memory.
        anchor: the model that it received.
        model: given where the answer must be a model.
    """
    content = arrays(answer.flatten()) if model is None else state_dict(model, anchor + answer.result.update)
    result, loss = answer.result, answer.loss
    counts = {"client": answer.client, "num-examples": answer.examples, "steps": result.steps, "lost": int(lost)}
    return RecordDict({ARRAYS: content, METRICS: MetricRecord({**counts, "lr": result.lr, "loss": loss})})


@dataclass(frozen=True)
class Expected:
    """The names, shapes and dtypes that an answer must have."""

    model: FlatModel
    """Like the clients', for the names of its tensors."""
    shapes: Mapping[str, tuple[torch.Size, torch.dtype]]
    """By name, of all tensors of an answer."""
    as_model: bool
    """Whether the answer is a model, as in `Order`."""
    algorithm: Algorithm = field(default_factory=Algorithm)
    """The method."""

    def lr_of(self, result: LocalResult) -> float:
        """The learning rate at the start of a client's round, to nine digits where it falls in the round.

        Args:
            result: of a client.
        """
        if self.algorithm.lr_floor == 1:
            return result.lr
        return float(f"{result.lr / self.algorithm.mean_lr(1.0, result.steps):.9g}")


def read_answer(content: RecordDict, client: int, anchor: Tensor, expected: Expected) -> tuple[ClientResult, bool]:
    """A client's answer, and whether it had lost its memory. An invalid answer is a ValueError.

    Args:
        content: the message.
        client: the client that was asked.
        anchor: the model that it was sent.
        expected: the form of an answer.
    """
    record, metrics = _record(content.array_records, ARRAYS), _record(content.metric_records, METRICS)
    if sorted(record) != sorted(expected.shapes):
        raise ValueError(f"it holds {sorted(record)}, expected {sorted(expected.shapes)}")
    named = tensors(record)
    for name, value in named.items():
        if (value.shape, value.dtype) != expected.shapes[name]:
            shape, dtype = expected.shapes[name]
            raise ValueError(f"{name} is {tuple(value.shape)} of {value.dtype}, expected {tuple(shape)} of {dtype}")
        # buffers may be not finite where the broadcast is, too: `Reduction` checks that
        if not name.startswith("buffers/") and value.is_floating_point() and not value.isfinite().all():
            raise ValueError(f"{name} is not finite")
    named = {name: value.to(anchor.device) for name, value in named.items()}
    if expected.as_model:
        named = {"update": torch.cat([named[name].reshape(-1) for name in expected.model.names]) - anchor}
    numbers = {name: _value(metrics, name, int) for name in ("client", "num-examples", "steps", "lost")}
    numbers |= {name: float(_value(metrics, name, float)) for name in ("lr", "loss")}
    if numbers["client"] != client:
        raise ValueError(f"it claims to be from client {numbers['client']}")
    if numbers["num-examples"] < 1 or numbers["steps"] < 1 or numbers["lost"] not in (0, 1):
        raise ValueError(f"its numbers are impossible: {numbers}")
    if not math.isfinite(numbers["loss"]) or not (math.isfinite(numbers["lr"]) and numbers["lr"] > 0):
        raise ValueError(f"its loss {numbers['loss']} or learning rate {numbers['lr']} is not finite and positive")
    result = LocalResult(named.pop("update"), numbers["steps"], numbers["lr"])
    e, c, buffers = unflatten(named, "perturbation", "correction", "buffers").values()
    answer = ClientResult(client, numbers["num-examples"], result, numbers["loss"], e, c, buffers, Memory())
    return answer, bool(numbers["lost"])


def _record(records: Mapping[str, Any], name: str) -> Any:
    if name not in records:
        raise ValueError(f"the record {name!r} is missing; there are {sorted(records)}")
    return records[name]


def _value(record: Mapping[str, Any], name: str, kind: type) -> Any:
    value = record.get(name)
    if type(value) is not kind:
        raise ValueError(f"{name!r} must be {kind.__name__}, got {value!r}")
    return value
