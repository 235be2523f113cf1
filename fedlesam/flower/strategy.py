"""The strategy: the server step of this project inside a Flower ServerApp."""

import copy
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy import Strategy as FlowerStrategy
from flwr.supercore import log
from torch import nn

from fedlesam import algorithms
from fedlesam.algorithms import Algorithm
from fedlesam.core import seeds
from fedlesam.core.checks import check_choice, check_count, check_number
from fedlesam.core.flat_model import FlatModel
from fedlesam.core.messages import Broadcast
from fedlesam.core.module_check import check_module, copied
from fedlesam.core.server import ServerState, server_step
from fedlesam.federation import count_active
from fedlesam.flower import checkpoint, records
from fedlesam.flower.answers import Answers, expected_form
from fedlesam.flower.client_sums import ClientSums, remove_clients
from fedlesam.flower.nodes import Nodes, exchange
from fedlesam.runs.lock import locked

Messages = Iterable[Message]
Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass(frozen=True)
class Round:
    """What one round did."""

    round: int
    """From 0, as t in the learning rate lr * decay ** t."""
    active: list[int]
    """The clients that were asked."""
    dropped: dict[int, str]
    """The drawn clients whose answer was not used, with the reason."""
    lost: list[int]
    """The clients that answered and had lost their memory: they count as never active before."""
    train_loss: float
    """Mean over the clients whose answers were used."""
    lr: float
    """The local learning rate at the start of the round."""
    seconds: float
    """From the first message to the new model."""
    bytes_down: int
    """Of the messages to all clients that were asked."""
    bytes_up: int
    """Of the answers that were used."""


@dataclass
class _OpenRound:
    """A round that waits for its answers."""

    ticket: str
    broadcast: Broadcast
    drawn: list[int]
    messages: dict[int, Message]
    dropped: dict[int, str]
    began: float = field(default_factory=time.perf_counter)


class Strategy(FlowerStrategy):
    """Any method of this project on Flower's Message API.

    Args:
        model: the first global model; it is copied.
        algorithm: a name of the catalogue, or an Algorithm (then `client_app` needs it, too).
        clients: the number of clients N. Their SuperNodes have partition-id 0 to N - 1.
        hyper: the hyper-parameters of a method given by name.
        active: the clients of a round, a count (int) or a share (float), drawn as `Federation` draws them.
        minimum: of the drawn clients, a count or a share, that must answer before the timeout for a round to count.
        seed: of the run.
        weighting: "examples" weights clients by their number of samples.
        answer: "model" has clients send their model in place of its change, as Flower's privacy mods need; only for
            methods that send nothing else.
        attempts: how often a round is tried.
        patience: seconds to wait for SuperNodes to connect: at the start for all, later for the minimum.
        folder: for a checkpoint after every round; the same call resumes from it. One process at a time trains in it.
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
            raise ValueError("hyper is for the name of a method; an Algorithm has its own")
        self.algorithm = algorithms.get(algorithm, **self.hyper) if isinstance(algorithm, str) else algorithm
        if not isinstance(self.algorithm, Algorithm):
            raise ValueError(f"algorithm must be a name or an Algorithm, got {algorithm!r}")
        if self.algorithm.privacy is not None:
            raise ValueError(
                "privacy as a stage of the method is for simulations: its noise is seeded, and clients know the seed; "
                "use Flower's own mods for differential privacy"
            )
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
        self.clients, self.seed, self.weighting, self.attempts = clients, seed, weighting, attempts
        self.active = count_active(active, clients)
        self.minimum = count_active(minimum, self.active)
        self.folder = Path(folder) if folder is not None else None
        check_module(model)
        records.check_state(model)
        self.flat, self.as_model = FlatModel(copied(model)), answer == "model"
        self.algorithm = self.algorithm.for_model(self.flat.tensors)
        self.state = ServerState.initial(self.algorithm, self.flat.weights.clone(), self.flat.buffers())
        self.used: dict[int, str] = {}
        """By client, the ticket of its last answer that was used."""
        self.sums = ClientSums(self.folder)
        self.rounds: list[Round] = []
        self.nodes = Nodes(clients, patience)
        self._form = expected_form(self.algorithm, self.state, self.flat, self.as_model)
        self._open: _OpenRound | None = None
        self._timeout: float | None = None
        self._shown: ArrayRecord | None = None
        self._held: ExitStack | None = None
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
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Train until a number of rounds is done.

        Args:
            grid: Flower's.
            initial_arrays: a state dict to begin with, in place of the model's own.
            num_rounds: rounds, those of the checkpoint included.
            timeout: seconds per round.
            train_config: sent with every message.
            evaluate_config: not used; clients do not evaluate.
            evaluate_fn: called with the number of rounds done and the arrays, at the start and after every round.
        """
        check_count("start", "num_rounds", num_rounds)
        check_number("start", "timeout", timeout, above=0)
        self._hold_folder()
        try:
            return self._train(grid, initial_arrays, num_rounds, timeout, train_config or ConfigRecord(), evaluate_fn)
        finally:
            self._release_folder()

    def _train(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None,
        num_rounds: int,
        timeout: float,
        train_config: ConfigRecord,
        evaluate_fn: Evaluate | None,
    ) -> Result:
        if initial_arrays is not None and self.state.round == 0:
            self._replace_model(initial_arrays)
        self.summary()
        self._timeout = timeout
        result, failed = Result(), 0
        result.arrays = self.arrays
        self._evaluate(evaluate_fn, result)
        while self.state.round < num_rounds:
            number = self.state.round + 1
            self.configure_train(number, result.arrays, train_config, grid)
            assert self._open is not None
            replies, missing = exchange(grid, self._open.messages, timeout)
            self._open.dropped |= missing
            arrays, metrics = self.aggregate_train(number, list(replies.values()))
            failed = failed + 1 if arrays is None else 0
            if arrays is not None and metrics is not None:
                result.arrays, result.train_metrics_clientapp[number] = arrays, metrics
                self._evaluate(evaluate_fn, result)
            elif failed == self.attempts:
                raise RuntimeError(
                    f"round {self.state.round}: fewer than {self.minimum} answers that could be used, {failed} times "
                    "in a row; the reasons are in the log, and the checkpoint is that of the last good round"
                )
        return result

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Messages:
        """The messages of a round.

        Args:
            server_round: Flower's count; the state has its own.
            arrays: the global model.
            config: sent with every message.
            grid: Flower's.
        """
        self._hold_folder()
        if self._shown is not None and arrays is not self._shown:
            self._replace_model(arrays)
        drawn = self.draw_active(self.state.round)
        online = self.nodes.wait(grid, drawn, self.minimum)
        sent, ticket = self.state.sent(self.algorithm), secrets.token_hex(16)
        shared = records.state_dict(self.flat, sent.weights) if self.as_model else records.arrays(sent.flatten())
        first = records.Order(sent, ticket, "", self.seed, repr(self.algorithm), self.name, self.hyper, self.as_model)
        how: dict[str, Any] = {"message_type": MessageType.TRAIN, "group_id": str(sent.round), "ttl": self._timeout}
        messages = {}
        for client in (client for client in drawn if client in online):
            order = replace(first, used=self.used.get(client, ""))
            content = records.order_content(order, shared, config)
            messages[client] = Message(content, dst_node_id=online[client], **how)
        absent = {client: "its SuperNode is not connected" for client in drawn if client not in online}
        self._open = _OpenRound(ticket, sent, drawn, messages, absent)
        return list(messages.values())

    def aggregate_train(self, server_round: int, replies: Messages) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The next global model, or (None, None) and nothing changed if too few answers could be used.

        Args:
            server_round: Flower's count.
            replies: of the clients.
        """
        if self._open is None:
            raise ValueError("aggregate_train must be called after configure_train")
        current, self._open = self._open, None
        broadcast, answers = current.broadcast, Answers(dropped=dict(current.dropped))
        answers.read(current.messages, replies, broadcast.weights, self._form)
        reduction = answers.reduce(broadcast, len(current.drawn), self.weighting == "examples")
        dropped, used = dict(sorted(answers.dropped.items())), answers.used
        for client, reason in dropped.items():
            log(WARNING, "round %d: client %d is dropped: %s", broadcast.round, client, reason)
        if len(used) < self.minimum:
            log(WARNING, "round %d: %d answers, %d needed; again", broadcast.round, len(used), self.minimum)
            return None, None
        state = remove_clients(self.state, self.algorithm, self.sums, answers.lost, self.clients)
        state = server_step(self.algorithm, state, reduction, self.clients)
        sums = self.sums.plus(self.algorithm, broadcast.round, used.values(), answers.lost)
        record = Round(
            round=broadcast.round,
            active=sorted(current.messages),
            dropped=dropped,
            lost=sorted(answers.lost),
            train_loss=reduction.loss,
            lr=self._form.lr_of(next(iter(used.values())).result),
            seconds=time.perf_counter() - current.began,
            bytes_down=sum(records.payload(message.content) for message in current.messages.values()),
            bytes_up=sum(answer.nbytes for answer in used.values()),
        )
        self._commit(state, self.used | dict.fromkeys(used, current.ticket), sums, [*self.rounds, record])
        log(INFO, "round %d: %d answers, loss %.4f, %.1f s", record.round, len(used), record.train_loss, record.seconds)
        numbers = {"train-loss": record.train_loss, "lr": record.lr, "answers": len(used)}
        sizes = {"dropped": len(dropped), "bytes-down": record.bytes_down, "bytes-up": record.bytes_up}
        return self.arrays, MetricRecord({**numbers, **sizes})

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Messages:
        """Clients do not evaluate: give `start` an evaluate_fn."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Messages) -> MetricRecord | None:
        """Clients do not evaluate."""
        return None

    def summary(self) -> None:
        """Log what will be run."""
        log(INFO, "method: %r", self.algorithm)
        log(INFO, "%d clients, %d active, %d must answer", self.clients, self.active, self.minimum)
        if self.state.round:
            log(INFO, "resumes from round %d of %s", self.state.round, self.folder)

    # The global model

    @property
    def arrays(self) -> ArrayRecord:
        """The global model as a state dict, frozen parameters and buffers included."""
        if self._shown is None:
            self.flat.load(self.state.weights, self.state.buffers)
            self._shown = ArrayRecord(self.flat.module.state_dict())
        return self._shown

    def draw_active(self, round: int) -> list[int]:
        """The active clients of a round, the same that `Federation` draws.

        Args:
            round: from 0.
        """
        rng = np.random.default_rng(seeds.derive(self.seed, "participation", round))
        return sorted(int(i) for i in rng.choice(self.clients, self.active, replace=False))

    def _replace_model(self, arrays: ArrayRecord) -> None:
        """Continue from another global model: the user's first one, or one that a Flower wrapper added noise to."""
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
        self.state = replace(state, weights=flat.weights, buffers=flat.buffers())
        if state.round:
            self._commit(self.state, self.used, self.sums, self.rounds)
        self._shown = arrays

    # Checkpoints

    @property
    def _metadata(self) -> dict[str, Any]:
        weights, settings = self.state.weights, ("clients", "active", "seed", "weighting")
        model = {"algorithm": repr(self.algorithm), "entries": weights.numel(), "dtype": str(weights.dtype)}
        return model | {name: getattr(self, name) for name in settings}

    def _hold_folder(self) -> None:
        """Refuse a folder in which another process trains; take over what was written since this object was made."""
        if self.folder is None or self._held is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            tell = stack.enter_context(locked(self.folder, "give the run another folder"))
            self._resume()
            tell(self.state.round)
            self._held = stack.pop_all()

    def _release_folder(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None

    def _commit(self, state: ServerState, used: dict[int, str], sums: ClientSums, rounds: list[Round]) -> None:
        """Make the round visible at once: first on disk, then in memory."""
        if self.folder is not None:
            lines = [asdict(record) for record in rounds]
            checkpoint.save(self.folder, checkpoint.Checkpoint(self._metadata, state, used, sums, lines))
        self.state, self.used, self.sums, self.rounds, self._shown = state, used, sums, rounds, None

    def _resume(self) -> None:
        found = checkpoint.load(self.folder, self._metadata) if self.folder is not None else None
        if found is None or (found.state.round, found.used) == (self.state.round, self.used):
            return
        self.state, self.used, self.sums, self.rounds, self._shown = found.state, dict(found.used), found.sums, [], None
        for line in found.rounds:
            line["dropped"] = {int(client): reason for client, reason in line["dropped"].items()}
            self.rounds.append(Round(**line))

    def _evaluate(self, evaluate: Evaluate | None, result: Result) -> None:
        found = evaluate(self.state.round, result.arrays) if evaluate is not None else None
        if found is not None:
            result.evaluate_metrics_serverapp[self.state.round] = found
            numbers = ", ".join(
                f"{name} {value:.4g}" for name, value in found.items() if isinstance(value, int | float)
            )
            log(INFO, "after round %d: %s", self.state.round, numbers)
