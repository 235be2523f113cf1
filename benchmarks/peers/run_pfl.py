"""pfl-research: its simulated backend and FederatedAveraging, in two processes that torchrun starts."""

import dataclasses
import functools
import itertools
from typing import Any

import torch
import torch.nn.functional as F
import work
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn


class Network(nn.Module):
    """The module as pfl wants it, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = work.first_model()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(work.in_layout(x))

    def loss(self, x: Tensor, y: Tensor, is_eval: bool = False) -> Tensor:
        self.train(not is_eval)
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {"loss": Weighted(float(self.loss(x, y, is_eval=True)) * len(y), len(y))}


class Averaging(FederatedAveraging):
    """pfl's own, without the evaluation of every active user that it cannot be told to leave out of round 0."""

    def get_next_central_contexts(self, *arguments: Any, **named: Any) -> Any:
        contexts, model, metrics = super().get_next_central_contexts(*arguments, **named)
        if contexts is not None:
            contexts = tuple(dataclasses.replace(context, do_evaluation=False) for context in contexts)
        return contexts, model, metrics


class Marks(TrainingProcessCallback):
    def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
        work.mark()
        return False, Metrics()


def samples(user: str) -> Dataset:
    round, client = map(int, user.split("-"))
    x, y = work.data()
    order = work.orders()[round, client]
    return Dataset([x[client, order], y[client, order]], user_id=user)


def main() -> None:
    users = itertools.cycle(f"{round}-{client}" for round, clients in enumerate(work.active()) for client in clients)
    clients = FederatedDataset(samples, functools.partial(next, users))
    network = Network()
    model = PyTorchModel(
        network,
        local_optimizer_create=functools.partial(torch.optim.SGD, weight_decay=work.WEIGHT_DECAY),
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    rounds = work.job().rounds
    work.mark()
    Averaging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=work.ACTIVE,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=clients, val_data=clients),
        model,
        NNTrainHyperParams(
            local_num_epochs=1,
            local_learning_rate=work.LR,
            local_batch_size=work.batch_size(),
            local_max_grad_norm=work.CLIP,
        ),
        NNEvalHyperParams(local_batch_size=work.batch_size()),
        callbacks=[Marks()],
    )
    if pytorch_ops.distributed.global_rank == 0:
        work.finish(work.flat(network), "pfl")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()  # else its threads may abort the process at its exit


if __name__ == "__main__":
    main()
