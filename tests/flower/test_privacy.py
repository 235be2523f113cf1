"""Flower's privacy mods and wrappers, with a method they go with, and refused with those they do not."""

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs Flower: pip install 'fedlesam[flower]'")

from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
)
from local_grid import LocalGrid
from scenes import CLIENTS, SEED, TIMEOUT, app, model, simulation
from torch import Tensor

from fedlesam.algorithms import CATALOGUE, examples
from fedlesam.flower import Strategy, records

pytestmark = pytest.mark.extras

GO_WITH = ["fedavg", "fedadam", "fedprox", "fedsam", "freesam", "fedlesam", "random-round", "random-step", "fedasam"]
GO_WITH += ["fednsam", "fednsam-released", "fedswa", "fedsol", "msam", "fedavgm", "fedyogi", "fedadagrad"]
"""Methods that send a model and nothing else, and whose server keeps no sum over clients."""


def scene(name: str, mods: list[object]) -> tuple[Strategy, LocalGrid]:
    hyper = examples(name)
    strategy = Strategy(model(), name, clients=CLIENTS, hyper=hyper, seed=SEED, answer="model", patience=0)
    return strategy, LocalGrid(app(mods=mods), CLIENTS)


@pytest.mark.parametrize("name", CATALOGUE)
def test_which_methods_they_go_with(name: str) -> None:
    if name in GO_WITH:
        scene(name, [])
    else:
        why = "is for simulations" if name == "dp-fedsam" else "send the model and nothing else"
        with pytest.raises(ValueError, match=why):
            scene(name, [])


def test_models_with_buffers_are_refused() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="no buffers"):
        Strategy(net, "fedavg", clients=3, answer="model")


def test_the_previous_rounds_model_would_be_sent_too() -> None:
    from fedlesam.algorithms import Algorithm
    from fedlesam.rules import GlobalAscent

    with pytest.raises(ValueError, match="send the model and nothing else"):
        Strategy(model(), Algorithm(GlobalAscent(reference="previous-round")), clients=3, answer="model")


@pytest.mark.parametrize("name", GO_WITH)
def test_without_noise_and_clipping_nothing_changes(name: str) -> None:
    """The models are sent and subtracted again: equal to rounding."""
    mod = LocalDpMod(clipping_norm=1e6, sensitivity=0.0, epsilon=1.0, delta=1e-5)
    strategy, grid = scene(name, [mod])
    strategy.start(grid, num_rounds=4, timeout=TIMEOUT)
    assert not any(record.dropped for record in strategy.rounds)
    fed = simulation(name)
    list(fed.run(4))
    torch.testing.assert_close(strategy.state.weights, fed.weights, atol=1e-5, rtol=0)


def updates(grid: LocalGrid, strategy: Strategy, anchor: Tensor) -> list[Tensor]:
    sent = []
    for client in range(CLIENTS):
        record = grid.of(client).replied[-1].content.array_records[records.ARRAYS]
        sent.append(torch.cat([value.reshape(-1) for value in records.tensors(record).values()]) - anchor)
    return sent


def test_local_differential_privacy_with_fedlesam() -> None:
    """What leaves a node is its clipped change plus noise; what it keeps, the received model, is no secret."""
    clip, noisy = 0.05, 0.3
    strategy, grid = scene("fedlesam", [LocalDpMod(clip, 0.0, 1.0, 1e-5)])
    anchor = strategy.state.weights.clone()
    strategy.start(grid, num_rounds=1, timeout=TIMEOUT)
    norms = [float(update.norm()) for update in updates(grid, strategy, anchor)]
    assert max(norms) <= clip * 1.001
    assert min(norms) > clip * 0.99, "the clients' own changes are longer"

    sensitivity = noisy / float(np.sqrt(2 * np.log(1.25 / 1e-5)))
    np.random.seed(0)  # noqa: NPY002 - Flower draws its noise from there
    strategy, grid = scene("fedlesam", [LocalDpMod(clip, sensitivity, 1.0, 1e-5)])
    strategy.start(grid, num_rounds=1, timeout=TIMEOUT)
    spread = float(torch.stack(updates(grid, strategy, anchor)).std())
    assert 0.8 * noisy < spread < 1.2 * noisy
    strategy.start(grid, num_rounds=4, timeout=TIMEOUT)
    assert strategy.state.round == 4
    assert not any(record.dropped for record in strategy.rounds)


def test_noise_is_not_the_same_every_time() -> None:
    """Training leaves the process's random numbers alone, so its seed is not the noise's."""
    ends = []
    for _ in range(2):
        strategy, grid = scene("fedlesam", [LocalDpMod(1.0, 0.1, 1.0, 1e-5)])
        strategy.start(grid, num_rounds=1, timeout=TIMEOUT)
        ends.append(strategy.state.weights)
    assert not torch.equal(*ends)


@pytest.mark.parametrize(
    ("wrapper", "mods"),
    [
        (DifferentialPrivacyServerSideFixedClipping, []),
        (DifferentialPrivacyClientSideFixedClipping, [fixedclipping_mod]),
    ],
)
def test_central_differential_privacy_with_fedlesam(wrapper: type, mods: list[object]) -> None:
    strategy, grid = scene("fedlesam", mods)
    private = wrapper(strategy, noise_multiplier=0.0, clipping_norm=1e6, num_sampled_clients=CLIENTS)
    private.start(grid, strategy.arrays, num_rounds=3, timeout=TIMEOUT)
    assert not any(record.dropped for record in strategy.rounds)
    fed = simulation("fedlesam")
    list(fed.run(3))
    torch.testing.assert_close(strategy.state.weights, fed.weights, atol=1e-5, rtol=0)


def test_the_noise_of_the_server_is_in_the_next_round() -> None:
    strategy, grid = scene("fedlesam", [])
    private = DifferentialPrivacyServerSideFixedClipping(strategy, 6.0, 0.5, CLIENTS)
    result = private.start(grid, strategy.arrays, num_rounds=2, timeout=TIMEOUT)
    sent = grid.of(0).seen[-1].content.array_records[records.ARRAYS]
    first = torch.cat([value.reshape(-1) for value in records.tensors(sent).values()])
    quiet, other = scene("fedlesam", [])
    quiet.start(other, num_rounds=1, timeout=TIMEOUT)
    assert (first - quiet.state.weights).norm() > 0.5, "the clients of round 1 received the noisy model"
    assert result.arrays is not None


def test_noise_on_the_model_is_refused_where_the_server_remembers() -> None:
    from scenes import scene as plain

    strategy, grid = plain("feddyn")
    private = DifferentialPrivacyClientSideFixedClipping(strategy, 0.1, 1.0, CLIENTS)
    with pytest.raises(ValueError, match="has server state that belongs to the unchanged one"):
        private.start(grid, strategy.arrays, num_rounds=2, timeout=TIMEOUT)


def test_secure_aggregation_does_not_take_strategies_of_the_message_api() -> None:
    """docs/deploy.md says so: in this version of Flower its workflow wants the API before."""
    from flwr.app import Context, RecordDict
    from flwr.server.workflow import SecAggPlusWorkflow

    with pytest.raises(TypeError, match="LegacyContext"):
        SecAggPlusWorkflow(3, 2)(None, Context(1, 1, {}, RecordDict(), {}))
