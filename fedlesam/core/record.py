"""What one round did."""

import dataclasses
import logging
import math
from dataclasses import dataclass, field
from typing import Any

from fedlesam.core.evaluation import PerClient

log = logging.getLogger("fedlesam")

MOST_LOGGED = 5
"""Clients that fail and are logged; the records have all of them."""
DROPOUT = "dropout"
"""The reason of a client that never answers because it was drawn to."""


@dataclass(frozen=True)
class Record:
    """What one round did; a line of metrics.jsonl."""

    round: int
    """From 0, as t in the learning rate lr * decay ** t."""
    active: list[int]
    """The clients that were asked, in their order."""
    train_loss: float
    """Mean over the clients that answered of the mean over their local steps; NaN if nobody did."""
    test_loss: float | None
    """Of the new global model; None where it was not evaluated."""
    test_accuracy: float | None
    """The same for the accuracy; None also where the task has none."""
    lr: float
    """The local learning rate at the start of the round."""
    seconds: float
    """Training and aggregation; evaluation is not counted."""
    backward_passes: int
    """Of all clients together."""
    bytes_down: int
    """What the server sent to all active clients."""
    bytes_up: int
    """What the clients that answered sent."""
    divergence: float
    """Mean over the clients that answered of norm(v_i - w_next) ** 2; NaN if nobody did."""
    per_client: PerClient | None = None
    """Test accuracy on every client's own mixture of classes, when asked for and evaluated."""
    dropped: dict[int, str] | None = None
    """The active clients that are not part of the round, and why: dropout, an error, an update that exploded."""
    epsilon: float | None = None
    """What the rounds so far have cost of a method with privacy; None where the accountant is not installed."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the task measures on the test data, in its order: the first one ranks."""
    smaller: tuple[str, ...] = ()
    """The metrics of which a smaller value is better."""
    test_clients: dict[str, PerClient] = field(default_factory=dict)
    """The task's metrics on clients' own test samples, over clients; the loss where the task has none."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON: without what was not measured, or is not a number JSON has."""
        known = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        if self.per_client is not None:
            known["per_client"] = self.per_client.as_dict()
        known["test_clients"] = {name: found.as_dict() for name, found in self.test_clients.items()}
        known["metrics"] = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        known["smaller"] = list(self.smaller)
        if list(self.metrics) in ([], ["accuracy"]):  # test_accuracy says it
            known.pop("metrics")
        if not self.smaller or "metrics" not in known:
            known.pop("smaller")
        if not self.test_clients:
            known.pop("test_clients")
        if self.dropped:
            known["dropped"] = {str(client): why for client, why in self.dropped.items()}
        return {k: v for k, v in known.items() if not (isinstance(v, float) and not math.isfinite(v))}

    @property
    def failed(self) -> dict[int, str]:
        """The clients that were dropped for an error, and why; dropout was asked for."""
        return {client: why for client, why in (self.dropped or {}).items() if why != DROPOUT}


def log_failed(record: Record, logged: int) -> int:
    """Log which clients failed, but not every time; dropout was asked for.

    Args:
        record: Of a round.
        logged: How many clients were logged before.

    Returns:
        How many were up to now.
    """
    for client, why in record.failed.items():
        logged += 1
        if logged <= MOST_LOGGED:
            log.warning("round %d: client %d is dropped: %s", record.round, client, why)
        if logged == MOST_LOGGED + 1:
            log.warning("more clients are dropped; all of them are in the records")
    return logged
