"""The strategy: the server step of this project inside a Flower ServerApp."""

import copy
import dataclasses
import json
import secrets
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy import Strategy as FlowerStrategy
from flwr.supercore import log
from torch import nn

from fedlesam import algorithms
from fedlesam.algorithms import Algorithm
from fedlesam.core import seeds
from fedlesam.core.checks import NotFinite, check_choice, check_count, check_number
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.messages import Broadcast, ClientResult
from fedlesam.core.module_check import check_module
from fedlesam.core.reduction import Reduction
from fedlesam.core.server import ServerState, server_step
from fedlesam.core.slots import LocalResult, RoundResult
from fedlesam.federation import count_active
from fedlesam.flower import checkpoint, records
from fedlesam.flower.checkpoint import Checkpoint
from fedlesam.flower.exchange import LATE, POLL, exchange
from fedlesam.flower.tally import Tally, summing, without


@dataclass(frozen=True)
class Round:
    """What one round did."""

    round: int
    """From 0, as t in the learning rate lr * decay ** t."""
    active: list[int]
    """The clients that were asked."""
    dropped: dict[int, str]
    """Those of the drawn clients whose answer was not used, and why."""
    lost: list[int]
    """Those that answered and had lost their memory: they count as never active before."""
    train_loss: float
    lr: float
    seconds: float
    bytes_down: int
    bytes_up: int
    """Of the answers that were used."""


@dataclass
class Open:
    """A round that waits for its answers."""

    ticket: str
    sent: Broadcast
    drawn: list[int]
    messages: dict[int, Message]
    dropped: dict[int, str]
    began: float = field(default_factory=time.perf_counter)


class Strategy(FlowerStrategy):
    """Any method of this project on Flower's Message API.

    `model` is the first global model and the form of all others; it is copied. `algorithm` is a name of the
    catalogue, with its hyper-parameters in `hyper`, or an Algorithm (then client_app needs it too). `clients` is N,
    the number of clients there are: their SuperNodes have partition-id 0 to N - 1. `active` of them, a count or a
    share, are drawn each round as `Federation` draws them. A round counts if `minimum` of the drawn clients, a count
    or a share, answered before the timeout; otherwise it is tried again, `attempts` times at most. `patience` is how
    many seconds to wait for SuperNodes to connect: at the start for all of them, later for the minimum.

    With a `folder`, every round ends with a checkpoint there, and the same call goes on from it. `answer="model"` has
    clients send their model in place of its change, which Flower's privacy mods need; only for methods that send
    nothing else (docs/deploy.md).
    """

    def __init__(
        self,
        model: nn.Module,
        algorithm: str | Algorithm = "fedavg",
        *,
        clients: int,
        hyper: Mapping[str, Any] | None = None,
        active: int | float = 1.0,
        minimum: int | float = 0.5,
        seed: int = 0,
        weighting: Literal["clients", "examples"] = "clients",
        answer: Literal["update", "model"] = "update",
        attempts: int = 3,
        patience: float = 60.0,
        folder: Path | str | None = None,
    ) -> None:
        self.name, self.hyper = (algorithm, dict(hyper or {})) if isinstance(algorithm, str) else ("", {})
        if hyper and not isinstance(algorithm, str):
            raise ValueError("hyper goes with the name of a method; an Algorithm has its own")
        self.algorithm = algorithms.get(algorithm, **self.hyper) if isinstance(algorithm, str) else algorithm
        if not isinstance(self.algorithm, Algorithm):
            raise ValueError(f"algorithm must be a name or an Algorithm, got {algorithm!r}")
        check_count("Strategy", "clients", clients)
        check_count("Strategy", "seed", seed, at_least=0)
        check_count("Strategy", "attempts", attempts)
        check_number("Strategy", "patience", patience, at_least=0)
        check_choice("Strategy", "weighting", weighting, ("clients", "examples"))
        check_choice("Strategy", "answer", answer, ("update", "model"))
        if weighting == "examples" and self.algorithm.uniform_rules:
            raise ValueError(
                f"weighting by examples does not work with {', '.join(self.algorithm.uniform_rules)}: "
                'the server state of these rules is a plain mean over clients; use weighting="clients"'
            )
        self.clients, self.seed, self.weighting = clients, seed, weighting
        self.active = count_active(active, clients)
        self.minimum = count_active(minimum, self.active)
        self.attempts, self.patience = attempts, patience
        self.folder = Path(folder) if folder is not None else None
        check_module(model)
        records.check_state(model)
        self.flat = FlatModel(copy.deepcopy(model))
        self.as_model = answer == "model"
        self.state = ServerState.initial(self.algorithm, self.flat.weights.clone(), self.flat.buffers())
        self.expected = self._expected()
        self.used: dict[int, str] = {}
        self.tally = Tally(self.folder)
        self.rounds: list[Round] = []
        self.nodes: dict[int, int] = {}
        """The SuperNode of each client, by Flower's node id."""
        self._claims: dict[int, int] = {}
        self._open: Open | None = None
        self._gathered = False
        self._timeout: float | None = None
        self._shown: ArrayRecord | None = None
        self._resume()

    # What Flower calls

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Train until `num_rounds` rounds are done, those of the checkpoint included.

        `timeout` is of a round, in seconds. `initial_arrays` is a state dict to begin with, in place of the model's
        own. `evaluate_fn(rounds done, arrays)` is called at the start and after every round.
        """
        check_count("start", "num_rounds", num_rounds)
        check_number("start", "timeout", timeout, above=0)
        if initial_arrays is not None and self.state.round == 0:
            self._adopt(initial_arrays)
        self.summary()
        self._timeout = timeout
        result, failed = Result(), 0
        result.arrays = self.arrays
        self._evaluate(evaluate_fn, result)
        while self.state.round < num_rounds:
            number = self.state.round + 1
            self.configure_train(number, result.arrays, train_config or ConfigRecord(), grid)
            assert self._open is not None
            replies, missing = exchange(grid, self._open.messages, timeout)
            self._open.dropped |= missing
            arrays, metrics = self.aggregate_train(number, list(replies.values()))
            if arrays is None or metrics is None:
                failed += 1
                if failed == self.attempts:
                    raise RuntimeError(
                        f"round {self.state.round}: fewer than {self.minimum} answers that could be used, {failed} "
                        "times in a row; the reasons are in the log, and the checkpoint is that of the last good round"
                    )
                continue
            failed = 0
            result.arrays, result.train_metrics_clientapp[number] = arrays, metrics
            self._evaluate(evaluate_fn, result)
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of a round. `server_round` is Flower's count; ours is in the state."""
        if self._shown is not None and arrays is not self._shown:
            self._adopt(arrays)
        drawn = self.draw_active(self.state.round)
        online = self._gather(grid, drawn)
        sent, ticket = self.state.broadcast(), secrets.token_hex(16)
        shared = records.broadcast_record(sent, self.flat if self.as_model else None)
        messages = {}
        for client in (client for client in drawn if client in online):
            used = self.used.get(client, "")
            order = records.Order(
                sent, ticket, used, self.seed, repr(self.algorithm), self.name, self.hyper, self.as_model
            )
            messages[client] = Message(
                records.order_content(order, shared, config),
                dst_node_id=online[client],
                message_type=MessageType.TRAIN,
                group_id=str(sent.round),
                ttl=self._timeout,
            )
        absent = {client: "its SuperNode is not connected" for client in drawn if client not in online}
        self._open = Open(ticket, sent, drawn, messages, absent)
        return list(messages.values())

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The next global model, or (None, None) and nothing changed if too few answers could be used."""
        if self._open is None:
            raise ValueError("aggregate_train comes after configure_train")
        current, self._open = self._open, None
        answers, lost, dropped = self._read(current, replies)
        reduction, answers = self._reduce(current, answers, dropped)
        self._report(current, dropped)
        if len(answers) < self.minimum:
            log(WARNING, "round %d: %d answers, %d needed; again", current.sent.round, len(answers), self.minimum)
            return None, None
        lost &= set(answers)
        state = without(self.state, self.algorithm, self.tally, lost, self.clients)
        state = server_step(self.algorithm, state, reduction, self.clients)
        tally = self.tally.plus(self.algorithm, current.sent.round, answers.values(), lost)
        record = Round(
            round=current.sent.round,
            active=sorted(current.messages),
            dropped=dict(sorted(dropped.items())),
            lost=sorted(lost),
            train_loss=reduction.loss,
            lr=reduction.lr,
            seconds=time.perf_counter() - current.began,
            bytes_down=sum(records.payload(message.content) for message in current.messages.values()),
            bytes_up=sum(answer.nbytes for answer in answers.values()),
        )
        self._commit(state, self.used | dict.fromkeys(answers, current.ticket), tally, [*self.rounds, record])
        log(INFO, "round %d: %d answers, loss %.4f", record.round, len(answers), record.train_loss)
        numbers = {"train-loss": record.train_loss, "lr": record.lr, "answers": len(answers)}
        sizes = {"left-out": len(dropped), "bytes-down": record.bytes_down, "bytes-up": record.bytes_up}
        return self.arrays, MetricRecord({**numbers, **sizes})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Clients do not evaluate: give `start` an evaluate_fn."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return None

    def summary(self) -> None:
        log(INFO, "method: %r", self.algorithm)
        log(INFO, "%d clients, %d active, %d must answer", self.clients, self.active, self.minimum)
        if self.state.round:
            log(INFO, "goes on from round %d of %s", self.state.round, self.folder)

    # The global model

    @property
    def arrays(self) -> ArrayRecord:
        """The global model as a state dict, frozen parameters and buffers included."""
        if self._shown is None:
            self.flat.load(self.state.weights, self.state.buffers)
            self._shown = ArrayRecord(self.flat.module.state_dict())
        return self._shown

    def draw_active(self, round: int) -> list[int]:
        """The active clients of a round, the same that `Federation` draws."""
        draw = np.random.default_rng(seeds.derive(self.seed, "participation", round))
        return sorted(int(i) for i in draw.choice(self.clients, self.active, replace=False))

    def _adopt(self, arrays: ArrayRecord) -> None:
        """Another global model than ours: the user's first one, or one that a wrapper of Flower has added noise to."""
        state = self.state
        if state.round and (state.perturbation or state.correction or state.server):
            raise ValueError(
                f"something changed the global model after round {state.round - 1}, and {self.algorithm!r} has server "
                "state that belongs to the unchanged one; use a method without, such as fedavg or fedlesam"
            )
        module = copy.deepcopy(self.flat.module)
        module.load_state_dict({name: records.tensor(value) for name, value in arrays.items()})
        flat = FlatModel(module)
        if state.round == 0:
            state = ServerState.initial(self.algorithm, flat.weights, flat.buffers())
        self.state, self._shown = replace(state, weights=flat.weights, buffers=flat.buffers()), arrays
        if state.round:
            self._save()

    # Who is there

    def _gather(self, grid: Grid, drawn: list[int]) -> dict[int, int]:
        """The SuperNodes of the drawn clients; those that are not connected get some time for it."""
        deadline = time.monotonic() + self.patience
        while True:
            online = self._identify(grid)
            here = {client: node for client, node in self.nodes.items() if node in online}
            ready = sum(client in here for client in drawn) >= self.minimum
            if (ready and self._gathered) or len(here) == self.clients or time.monotonic() >= deadline:
                self._gathered = True
                return here
            time.sleep(POLL)

    def _identify(self, grid: Grid) -> set[int]:
        """Ask SuperNodes that were not seen before which client they are."""
        online = set(grid.get_node_ids())
        unknown = sorted(online - set(self._claims))
        asked = {node: Message(RecordDict(), dst_node_id=node, message_type=MessageType.QUERY) for node in unknown}
        replies, missing = exchange(grid, asked, max(self.patience, 60.0))
        for node, reply in replies.items():
            try:
                if reply.has_error():
                    raise ValueError(reply.error.reason)
                client = dict(reply.content.metric_records).get(records.METRICS, {}).get("client")
                if type(client) is not int or not 0 <= client < self.clients:
                    raise ValueError(f"it is client {client!r}, and there are clients 0 to {self.clients - 1}")
                self._claims[node] = client
            except ValueError as error:
                missing[node] = str(error)
        for node, reason in missing.items():
            log(WARNING, "node %d is not used: %s", node, reason)
        for node in sorted(online & set(self._claims)):
            client = self._claims[node]
            if self.nodes.get(client, node) not in online or client not in self.nodes:
                self.nodes[client] = node
            elif self.nodes[client] != node and node in unknown:
                log(WARNING, "node %d is not used: client %d is node %d", node, client, self.nodes[client])
        return online

    # What came back

    def _read(
        self, current: Open, replies: Iterable[Message]
    ) -> tuple[dict[int, ClientResult], set[int], dict[int, str]]:
        asked = {message.metadata.message_id: client for client, message in current.messages.items()}
        answers: dict[int, ClientResult] = {}
        lost: set[int] = set()
        dropped = dict(current.dropped)
        for reply in replies:
            client = asked.get(reply.metadata.reply_to_message_id)
            if client is None or client in answers:
                continue
            try:
                if reply.has_error():
                    raise ValueError(reply.error.reason)
                weights = current.sent.weights
                answers[client], forgot = records.read_answer(reply.content, client, weights, self.expected)
                lost |= {client} if forgot else set()
            except Exception as error:
                dropped[client] = str(error)
        for client in current.messages:
            if client not in answers:
                dropped.setdefault(client, LATE)
        if answers:
            usual = statistics.median_low(answer.result.lr for answer in answers.values())
            for client in [client for client, answer in answers.items() if answer.result.lr != usual]:
                dropped[client] = f"its learning rate is {answers.pop(client).result.lr}, that of the others {usual}"
        return dict(sorted(answers.items())), lost, dropped

    def _reduce(
        self, current: Open, answers: dict[int, ClientResult], dropped: dict[int, str]
    ) -> tuple[Reduction, dict[int, ClientResult]]:
        """The sums, and the answers that are in them."""
        by_examples = self.weighting == "examples"
        weight = sum(answer.examples for answer in answers.values()) if by_examples else len(current.drawn)
        sent, added = current.sent, {}
        reduction = Reduction(sent.round, max(1, weight), by_examples=by_examples, buffers=sent.buffers)
        for client, answer in answers.items():
            try:
                reduction.add(answer)
                added[client] = answer
            except NotFinite as error:
                dropped[client] = str(error)
        return reduction, added

    def _report(self, current: Open, dropped: dict[int, str]) -> None:
        for client, reason in sorted(dropped.items()):
            log(WARNING, "round %d: client %d is left out: %s", current.sent.round, client, reason)

    def _expected(self) -> records.Expected:
        """From the rules themselves: what they would upload after a round in which nothing happened."""
        w, state = self.state.weights, self.state
        perturbation, correction = self.algorithm.perturbation, self.algorithm.correction
        uploads = {f"perturbation.{k}": v for k, v in perturbation.upload(perturbation.begin(w, {})).items()}
        after = correction.next_client_state({}, state.correction, LocalResult(torch.zeros_like(w), 1, 1.0))
        uploads |= {f"correction.{k}": v for k, v in correction.upload({}, after).items()}
        uploads |= {f"buffers.{k}": v for k, v in state.buffers.items()}
        if self.as_model:
            self._check_as_model(more=bool(uploads))
            uploads = dict(zip(self.flat.names, self.flat.views(w), strict=True))
        else:
            uploads["update"] = w
        return records.Expected(self.flat, {k: (v.shape, v.dtype) for k, v in uploads.items()}, self.as_model)

    def _check_as_model(self, more: bool) -> None:
        w, broadcast = self.state.weights, self.state.broadcast()
        if self.state.buffers or len(self.flat.module.state_dict()) != len(self.flat.names):
            raise ValueError(
                'answer="model" is for models whose state is their trainable parameters: no buffers (BatchNorm), no '
                "frozen parameters; use GroupNorm"
            )
        more = more or bool(broadcast.perturbation or broadcast.correction or summing(self.algorithm))
        still = RoundResult(w, torch.zeros_like(w), 1.0, 1.0, 1.0, {})
        if more or self.algorithm.perturbation.aggregate({}, still) or self.algorithm.correction.aggregate({}, still):
            raise ValueError(
                'answer="model" is for methods that send the model and nothing else, and whose server keeps no sum '
                f"over clients, such as fedavg, fedsam or fedlesam; not for {self.algorithm!r}"
            )

    # What is kept

    @property
    def _about(self) -> dict[str, Any]:
        return {
            "algorithm": repr(self.algorithm),
            "clients": self.clients,
            "active": self.active,
            "seed": self.seed,
            "weighting": self.weighting,
            "entries": self.state.weights.numel(),
            "dtype": str(self.state.weights.dtype),
        }

    def _commit(self, state: ServerState, used: dict[int, str], tally: Tally, rounds: list[Round]) -> None:
        """The round becomes visible at once: first on disk, then here."""
        if self.folder is not None:
            lines = [dataclasses.asdict(record) for record in rounds]
            checkpoint.save(self.folder, Checkpoint(self._about, state, used, tally, lines))
        self.state, self.used, self.tally, self.rounds, self._shown = state, used, tally, rounds, None

    def _save(self) -> None:
        shown = self._shown
        self._commit(self.state, self.used, self.tally, self.rounds)
        self._shown = shown

    def _resume(self) -> None:
        found = checkpoint.load(self.folder, self._about) if self.folder is not None else None
        if found is None:
            return
        self.state, self.used, self.tally = found.state, dict(found.used), found.tally
        for line in found.rounds:
            dropped = {int(client): reason for client, reason in line["dropped"].items()}
            self.rounds.append(Round(**{**line, "dropped": dropped}))

    def _evaluate(self, evaluate: Callable[[int, ArrayRecord], MetricRecord | None] | None, result: Result) -> None:
        found = evaluate(self.state.round, result.arrays) if evaluate is not None else None
        if found is not None:
            result.evaluate_metrics_serverapp[self.state.round] = found
            log(INFO, "after round %d: %s", self.state.round, json.dumps(dict(found)))
