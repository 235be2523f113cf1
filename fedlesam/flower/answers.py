"""The answers of a round: their expected form, which replies are used, and their reduction."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from flwr.app import Message
from torch import Tensor

from fedlesam.algorithms import Algorithm
from fedlesam.core.checks import NotFinite
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.messages import Broadcast, ClientResult
from fedlesam.core.reduction import Reduction
from fedlesam.core.server import ServerState
from fedlesam.core.slots import LocalResult, RoundResult
from fedlesam.core.state import flatten
from fedlesam.flower import records
from fedlesam.flower.client_sums import summing_slots
from fedlesam.flower.nodes import LATE


@dataclass
class Answers:
    """The answers of a round that are used, and the reason of each client that is dropped."""

    used: dict[int, ClientResult] = field(default_factory=dict)
    """By client."""
    lost: set[int] = field(default_factory=set)
    """The clients that had lost their memory."""
    dropped: dict[int, str] = field(default_factory=dict)
    """By client, why its answer is not used."""

    def read(self, sent: Mapping[int, Message], replies: Iterable[Message], w: Tensor, form: records.Expected) -> None:
        """Read the replies; an invalid one drops its client.

        Args:
            sent: the messages, by client.
            replies: what came back.
            w: the model that was sent.
            form: of an answer.
        """
        asked = {message.metadata.message_id: client for client, message in sent.items()}
        for reply in replies:
            client = asked.get(reply.metadata.reply_to_message_id)
            if client is None or client in self.used:
                continue
            try:
                if reply.has_error():
                    raise ValueError(reply.error.reason)
                self.used[client], lost = records.read_answer(reply.content, client, w, form)
                self.lost |= {client} if lost else set()
            except Exception as error:
                self.dropped[client] = str(error)
        self.dropped = {client: LATE for client in sent if client not in self.used} | self.dropped
        rates = {client: form.lr_of(answer.result) for client, answer in sorted(self.used.items())}
        usual = statistics.median_low(rates.values()) if rates else None
        others = {client: lr for client, lr in rates.items() if lr != usual}
        self.dropped |= {c: f"its learning rate is {lr}, that of the others {usual}" for c, lr in others.items()}
        self.used = {client: self.used[client] for client in rates if client not in others}

    def reduce(self, broadcast: Broadcast, drawn: int, by_examples: bool) -> Reduction:
        """Add the answers up; one that cannot be added drops its client.

        Args:
            broadcast: the model that was sent.
            drawn: the number of clients of the round.
            by_examples: whether clients are weighted by their number of samples.
        """
        weight = sum(answer.examples for answer in self.used.values()) if by_examples else drawn
        reduction = Reduction(broadcast.round, max(1, weight), by_examples=by_examples, buffers=broadcast.buffers)
        for client, answer in list(self.used.items()):
            try:
                reduction.add(answer)
            except NotFinite as error:
                self.dropped[client] = str(error)
                del self.used[client]
        self.lost &= set(self.used)
        return reduction


def expected_form(algorithm: Algorithm, state: ServerState, model: FlatModel, as_model: bool) -> records.Expected:
    """The form of an answer, from what the rules would upload after a round in which nothing happened.

    Args:
        algorithm: the method.
        state: the server's.
        model: the global model.
        as_model: whether an answer is a model.
    """
    w, perturbation, correction = state.weights, algorithm.perturbation, algorithm.correction
    after = correction.next_client_state({}, state.correction, LocalResult(torch.zeros_like(w), 1, 1.0))
    sent = {"perturbation": perturbation.upload(perturbation.begin(w, {})), "correction": correction.upload({}, after)}
    uploads = flatten(**sent, buffers=state.buffers)
    if as_model:
        _check_as_model(algorithm, state, model, more=bool(uploads))
        uploads = dict(zip(model.names, model.views(w), strict=True))
    else:
        uploads["update"] = w
    return records.Expected(model, {k: (v.shape, v.dtype) for k, v in uploads.items()}, as_model, algorithm)


def _check_as_model(algorithm: Algorithm, state: ServerState, model: FlatModel, more: bool) -> None:
    w, broadcast = state.weights, state.broadcast()
    if state.buffers or len(model.module.state_dict()) != len(model.names):
        raise ValueError(
            'answer="model" is for models whose state is their trainable parameters: no buffers (BatchNorm), no '
            "frozen parameters; use GroupNorm"
        )
    more = more or bool(broadcast.perturbation or broadcast.correction or summing_slots(algorithm))
    still = RoundResult(w, torch.zeros_like(w), 1.0, 1.0, 1.0, {})
    if more or algorithm.perturbation.aggregate({}, still) or algorithm.correction.aggregate({}, still):
        raise ValueError(
            'answer="model" is for methods that send the model and nothing else, and whose server keeps no sum '
            f"over clients, such as fedavg, fedsam or fedlesam; not for {algorithm!r}"
        )
