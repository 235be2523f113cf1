"""Bad input ends in a ValueError that names the value, the place and the remedy."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from worlds import federation, mlp, play, samples, states, training

from fedlesam import Algorithm, Federation, LocalTraining, algorithms
from fedlesam.core.slots import State, Step
from fedlesam.rules import (
    Adam,
    Average,
    ClientMomentum,
    ControlVariates,
    Dynamic,
    GlobalAscent,
    LocalAscent,
    Perturbation,
)

NAN = math.nan
X, Y = samples((4,))[0]


def loosely(**settings: Any) -> Federation:
    return Federation(mlp(), samples(), **settings)


def with_client(client: Any, **settings: Any) -> Federation:
    return federation("fedavg", clients=[(X, Y), client], **settings)


class Rows:
    """Neither tensors nor a Dataset."""


class Nesterov(LocalAscent):
    """SAM at a point ahead, as in FedNSAM."""

    def round_perturbation(self, anchor: Tensor, client_state: State, server_state: State) -> Tensor:
        return -anchor


class Both(GlobalAscent):
    gradient = "previous"

    def ascend(self, gradient: Tensor, step: Step) -> Tensor:
        return gradient


class Forgotten(Perturbation):
    def ascend(self, gradient: Tensor, step: Step) -> Tensor:
        return gradient


class Misspelt(LocalAscent):
    gradient = "there"


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown method": (lambda: federation("fedlsam"), r"unknown algorithm 'fedlsam': did you mean 'fedlesam'\?"),
    "unknown method, not like any": (lambda: algorithms.get("zzz"), r"unknown algorithm 'zzz'.*known: fedavg, fedadam"),
    "unknown hyper-parameter": (lambda: algorithms.get("fedavg", rho=0.1), r"fedavg has no rho; it takes lr_g"),
    "not an algorithm": (lambda: federation(3), r"algorithm must be a name or an Algorithm, got 3"),  # type: ignore[arg-type]
    "a rule in the wrong slot": (
        lambda: Algorithm(perturbation=Average()),  # type: ignore[arg-type]
        r"perturbation must be a Perturbation, got Average\(lr_g=1.0\)",
    ),
    "rho below 0": (lambda: algorithms.get("fedsam", rho=-0.1), r"LocalAscent: rho must be at least 0, got -0.1"),
    "threshold inf": (
        lambda: algorithms.get("fedgf", threshold=float("inf")),
        "threshold must be a finite number, got inf",
    ),
    "numpy clients": (lambda: federation("fedavg", clients=[(X.numpy(), Y.numpy())]), r"give torch.from_numpy\(x\)"),
    "a dict of clients": (lambda: federation("fedavg", clients={0: (X, Y)}), r"use list\(clients.values\(\)\)"),
    "steps and epochs": (lambda: LocalTraining(steps=3, epochs=2), "steps=3 and epochs=2: give one of the two"),
    "a rate that raises": (
        lambda: federation("fedavg", local=LocalTraining(lr=lambda round: 1 / round)).round(),
        r"lr\(round=0\) raises ZeroDivisionError",
    ),
    "callbacks": (lambda: federation("fedavg").fit(1, callbacks=print), "callbacks must be a list of functions"),
    "rho nan": (lambda: algorithms.get("fedlesam", rho=NAN), r"GlobalAscent: rho must be at least 0, got nan"),
    "rho infinite": (lambda: algorithms.get("fedsmoo", rho=math.inf), r"CorrectedAscent: rho must be .*got inf"),
    "rho a word": (
        lambda: algorithms.get("freesam", rho="0.1"),
        r"PreviousStepAscent: rho must be a number, got '0.1'",
    ),  # type: ignore[arg-type]
    "first": (lambda: GlobalAscent(0.1, first="zero"), r"first must be one of 'none', 'origin', got 'zero'"),  # type: ignore[arg-type]
    "reference": (lambda: GlobalAscent(0.1, reference="last"), r"reference must be one of 'received'.*got 'last'"),  # type: ignore[arg-type]
    "alpha 0": (lambda: ClientMomentum(0.0), r"ClientMomentum: alpha must be above 0, got 0.0"),
    "alpha above 1": (lambda: algorithms.get("fedcm", alpha=1.5), r"ClientMomentum: alpha .* at most 1, got 1.5"),
    "lam below 0": (
        lambda: algorithms.get("feddyn", lam=-1.0),
        r"DynamicRegulariser: lam must be at least 0, got -1.0",
    ),
    "prox below 0": (lambda: algorithms.get("fedprox", prox=-1.0), r"Proximal: prox must be at least 0, got -1.0"),
    "lr_g 0": (lambda: algorithms.get("fedavg", lr_g=0.0), r"Average: lr_g must be above 0, got 0.0"),
    "lr_g dynamic": (lambda: algorithms.get("fedlesam-d", lr_g=0.5), r"Dynamic: .*lr_g must be 1, got 0.5"),
    "lr_g dynamic, by hand": (lambda: Dynamic(NAN), r"lr_g must be 1, got nan"),
    "Adam b1": (lambda: Adam(b1=1.0), r"Adam: b1 must be below 1, got 1.0"),
    "Adam eps": (lambda: Adam(eps=0.0), r"Adam: eps must be above 0, got 0.0"),
    "decay of the method": (lambda: Algorithm(lr_decay=0.0), r"Algorithm: lr_decay must be above 0, got 0.0"),
    "lr 0": (lambda: LocalTraining(lr=0.0), r"LocalTraining: lr must be above 0, got 0.0"),
    "lr below 0": (lambda: LocalTraining(lr=-1), r"LocalTraining: lr must be above 0, got -1"),
    "lr nan": (lambda: LocalTraining(lr=NAN), r"LocalTraining: lr must be above 0, got nan"),
    "lr_decay": (lambda: LocalTraining(lr_decay=0.0), r"LocalTraining: lr_decay must be above 0, got 0.0"),
    "weight decay": (lambda: LocalTraining(weight_decay=-1e-3), r"weight_decay must be at least 0, got -0.001"),
    "clip 0": (lambda: LocalTraining(clip=0.0), r"LocalTraining: clip must be above 0, got 0.0"),
    "clip scope": (
        lambda: LocalTraining(clip_scope="all"),
        r"clip_scope must be one of 'loss', 'corrected', got 'all'",
    ),  # type: ignore[arg-type]
    "momentum 1": (lambda: LocalTraining(momentum=1.0), r"LocalTraining: momentum must be below 1, got 1.0"),
    "batch size 0": (lambda: LocalTraining(batch_size=0), r"batch_size must be a whole number from 1, got 0"),
    "batch size half": (lambda: LocalTraining(batch_size=0.5), r"batch_size must be a whole number from 1, got 0.5"),  # type: ignore[arg-type]
    "epochs 0": (lambda: LocalTraining(epochs=0), r"LocalTraining: epochs must be a whole number from 1, got 0"),
    "epochs a bool": (lambda: LocalTraining(epochs=True), r"epochs must be a whole number from 1, got True"),
    "epochs from 0": (lambda: LocalTraining(epochs=range(3)), r"epochs must be a whole number from 1, got 0"),
    "epochs from nothing": (lambda: LocalTraining(epochs=range(3, 3)), r"epochs must be a whole number from 1"),
    "active 0": (lambda: federation("fedavg", active=0), r"active must be from 1 to the number of clients, 6, got 0"),
    "active above N": (lambda: federation("fedavg", active=7), r"active must be from 1 to .* 6, got 7"),
    "active share 0": (lambda: federation("fedavg", active=0.0), r"active as a share must be above 0.*got 0.0"),
    "active share above 1": (lambda: federation("fedavg", active=10.0), r"at most 1, got 10.0; a count is an int"),
    "active share nan": (lambda: federation("fedavg", active=NAN), r"active as a share must be above 0.*got nan"),
    "active a bool": (lambda: federation("fedavg", active=True), r"active must be a count .* got True"),
    "active a word": (lambda: federation("fedavg", active="all"), r"active must be a count .* got 'all'"),
    "active list twice": (lambda: federation("fedavg").round([1, 3, 1]), r"active names a client twice: \[1, 1, 3\]"),
    "active list below": (
        lambda: federation("fedavg").round([-1, 2]),
        r"active names clients outside 0 to 5: \[-1, 2\]",
    ),
    "active list above": (lambda: federation("fedavg").round([0, 6]), r"active names clients outside 0 to 5: \[0, 6\]"),
    "model without values": (
        lambda: federation("fedavg", model=nn.Linear(5, 3, device="meta")),
        "weight of the model has no values yet",
    ),
    "labels that are texts": (
        lambda: federation("fedavg", clients=[[(x, "a") for x in X]]),
        r"client 0: the targets of a batch are a tuple of str, and a tensor of numbers is needed; number the labels",
    ),
    "sparse inputs": (lambda: with_client((X.to_sparse(), Y)), r"client 1: x is torch.sparse_coo; give x.to_dense\(\)"),
    "no test samples": (
        lambda: federation("fedavg", test_clients=[(X[:0], Y[:0])] * 6),
        "the test samples of client 0: has no samples; give None",
    ),
    "test clients of a generator": (
        lambda: federation("fedavg", test_clients=(pair for pair in [(X, Y)])),
        r"test_clients must be a list with an entry for each client, got <generator .*; use list\(tests\)",
    ),
    "lr of NumPy": (
        lambda: LocalTraining(lr=np.float32(0.5)),
        r"lr must be a number, got np.float32\(0.5\); give 0.5",
    ),
    "active list empty": (
        lambda: federation("fedavg").round([]),
        r"active is empty: a round needs at least one client",
    ),
    "active list a mask": (
        lambda: federation("fedavg").round([False, True]),
        r"active must list client numbers.*False",
    ),
    "active list fractions": (lambda: federation("fedavg").round([0.5, 2]), r"active must list client numbers.*0\.5"),  # type: ignore[list-item]
    "no clients": (lambda: federation("fedavg", clients=[]), r"there are no clients"),
    "an iterator": (
        lambda: federation("fedavg", clients=(c for c in [])),
        r"clients must be a list.*use list\(clients",
    ),
    "a set": (lambda: federation("fedavg", clients={1}), r"clients must be a list.*got \{1\}; use list\(clients"),
    "an empty client": (lambda: with_client((X[:0], Y[:0])), r"client 1: has no samples; leave it out"),
    "an empty data set": (lambda: with_client(TensorDataset(X[:0], Y[:0])), r"client 1: has no samples"),
    "x and y differ": (lambda: with_client((X, Y[:3])), r"client 1: x has 4 samples and y has 3"),
    "a client of one tensor": (lambda: with_client((X,)), r"client 1: expected a pair of tensors \(x, y\), got"),
    "a client of arrays": (
        lambda: with_client((X.numpy(), Y.numpy())),
        r"client 1: expected a pair of tensors.*ndarray",
    ),
    "a client of anything": (lambda: with_client(Rows()), r"client 1: expected \(x, y\) tensors or .* got Rows"),
    "one pair for all clients": (
        lambda: federation("fedavg", clients=(X, Y)),
        r"client 0: expected \(x, y\) tensors or a map-style torch Dataset, got Tensor",
    ),
    "local as a dict": (lambda: loosely(local={"lr": 1}), r"local must be an object fl.LocalTraining.*'lr'"),
    "failures as a string": (lambda: loosely(failures="drop"), r"failures must be an object fl.FailurePolicy.*'drop'"),
    "execution as a dict": (lambda: loosely(execution={}), r"execution must be an object fl.Execution"),
    "a data set of three": (lambda: with_client(TensorDataset(X, Y, Y)), r"client 1: .*two tensors.*3"),
    "label too large": (
        lambda: with_client((X, Y + 3)),
        r"client 1: label [345] is outside 0 to 2, the model's 3 outputs",
    ),
    "label below 0": (lambda: with_client((X, Y - 5)), r"client 1: label -5 is outside 0 to 2, the model's 3 outputs"),
    "label in a data set": (lambda: with_client(TensorDataset(X, Y + 3)), r"client 1: label [345] is outside 0 to 2"),
    "label in the test set": (lambda: federation("fedavg", test=(X, Y + 3)), r"the test set: label [345] is outside"),
    "an empty test set": (lambda: federation("fedavg", test=(X[:0], Y[:0])), r"the test set: has no samples"),
    "test x and y differ": (
        lambda: federation("fedavg", test=(X, Y[:1])),
        r"the test set: x has 4 samples and y has 1",
    ),
    "nothing to train": (
        lambda: federation("fedavg", model=mlp().requires_grad_(False)),
        r"no trainable parameters.*requires_grad",
    ),
    "no parameters": (lambda: federation("fedavg", model=nn.ReLU()), r"no trainable parameters"),
    "only empty parameters": (
        lambda: federation("fedavg", model=nn.ParameterList([torch.empty(0), torch.empty(0, 3)])),
        r"no trainable parameters",
    ),
    "mixed precision": (
        lambda: federation("fedavg", model=nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3).double())),
        r"one dtype and one device.*float32.*float64.*convert the model first",
    ),
    "complex parameters": (
        lambda: federation("fedavg", model=nn.Linear(5, 3, dtype=torch.complex64)),
        r"must be real numbers, got torch.complex64",
    ),
    "a model for other inputs": (
        lambda: federation("fedavg", model=mlp((6, 3))),
        r"the model does not take inputs of shape \(1, 5\), as client 0 has",
    ),
    "a model of another precision": (
        lambda: federation("fedavg", model=mlp(dtype=torch.float32)),
        r"the model does not take inputs of shape \(1, 5\).*dtype",
    ),
    "a constant perturbation and an ascent": (
        lambda: Algorithm(Nesterov()),
        r"Nesterov has round_perturbation\(\) and gradient = 'current', with which it is never called; .* begin",
    ),
    "an inherited constant and an ascent": (
        lambda: Algorithm(Both(0.1)),
        r"Both has round_perturbation\(\) and gradient = 'previous'",
    ),
    "an ascent that is never called": (
        lambda: Algorithm(Forgotten()),
        r'Forgotten has ascend\(\), but its gradient is "unused", .* set gradient to "current", "previous" or "none"',
    ),
    "a gradient there is not": (
        lambda: Algorithm(Misspelt()),
        r"Misspelt: gradient must be one of 'unused', 'none', 'current', 'previous', got 'there'",
    ),
    "weighting": (
        lambda: federation("fedavg", weighting="samples"),
        r"weighting must be one of 'clients', 'examples', got 'samples'",
    ),
    "seed": (lambda: federation("fedavg", seed=-1), r"seed must be a whole number from 0, got -1"),
    "threads": (lambda: federation("fedavg", threads=0), r"threads must be a whole number from 1, got 0"),
    "evaluate_every": (lambda: federation("fedavg", evaluate_every=0), r"evaluate_every must be a whole number from 1"),
    "no rounds": (lambda: list(federation("fedavg").run(0)), r"rounds must be a whole number from 1, got 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(case: str) -> None:
    make, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("method", "rules"),
    [
        ("scaffold", "ControlVariates"),
        ("fedgamma", "ControlVariates"),
        ("fedlesam-s", "ControlVariates"),
        ("freesam-s", "ControlVariates"),
        ("feddyn", "DynamicRegulariser, Dynamic"),
        ("fedlesam-d", "DynamicRegulariser, Dynamic"),
        ("freesam-d", "DynamicRegulariser, Dynamic"),
        ("fedsmoo", "CorrectedAscent, DynamicRegulariser, Dynamic"),
    ],
)
def test_weighting_by_examples_needs_a_method_without_memory(method: str, rules: str) -> None:
    message = rf'weighting by examples does not work with {rules}: .* use weighting="clients"'
    with pytest.raises(ValueError, match=message):
        federation(method, weighting="examples")


def test_an_epochs_function_that_gives_nothing() -> None:
    fed = federation("fedavg", local=training(epochs=lambda round, client: round))
    with pytest.raises(ValueError, match=r"epochs\(round=0, client=3\) must be a whole number from 1, got 0") as caught:
        fed.round([3])
    assert caught.value.__notes__ == ["while training client 3 in round 0"]
    assert fed.state.round == 0


def test_a_failed_check_leaves_the_federation_usable() -> None:
    fed, other = federation("scaffold"), federation("scaffold")
    with pytest.raises(ValueError, match="twice"):
        fed.round([0, 0])
    assert torch.equal(play(fed, [[0, 1]]).weights, play(other, [[0, 1]]).weights)
    assert states(fed).keys() == states(other).keys()


def test_a_method_of_ones_own() -> None:
    mine = Algorithm(GlobalAscent(0.1), ControlVariates(), Adam())
    assert float((play(federation(mine), [[0, 1], [1, 2]]).weights - federation(mine).weights).norm()) > 0
