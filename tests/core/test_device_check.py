"""Rules that keep a GPU waiting, or draw by themselves, are found; none of the catalogue does."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from worlds import federation

import fedlesam
from fedlesam import rules
from fedlesam.algorithms import CATALOGUE


@pytest.mark.parametrize("method", CATALOGUE)
def test_rules_compute_on_the_device(method: str) -> None:
    rules.check_on_device(federation(method).algorithm)


@dataclass(frozen=True)
class Reads(rules.Perturbation):
    """What a user may write."""

    gradient = "current"
    how: str = "if"

    def ascend(self, gradient: Tensor, step: rules.Step) -> Tensor:
        if self.how == "if":
            return gradient if gradient.norm() > 0 else gradient * 0
        return gradient * (1 / float(gradient.norm()) if self.how == "float" else 1 / gradient.norm().item())


@dataclass(frozen=True)
class ReadsOnce(rules.Correction):
    def prepare(self, anchor: Tensor, client_state: rules.State, server_state: rules.State) -> rules.AffineStep:
        return rules.AffineStep(gain=1 / (1 + float(anchor.norm())))


@pytest.mark.parametrize("rule", [Reads(how="if"), Reads(how="float"), Reads(how="item"), ReadsOnce()])
def test_a_users_rule_that_reads_is_found(rule: rules.Perturbation | rules.Correction) -> None:
    slot = "correction" if isinstance(rule, rules.Correction) else "perturbation"
    with pytest.raises(ValueError, match=r"Reads.* reads a number of a vector on the host.*torch\.where"):
        rules.check_on_device(fedlesam.Algorithm(**{slot: rule}))


@dataclass(frozen=True)
class Distils(rules.Perturbation):
    """What a teacher's rule may read."""

    teaches = "descent"

    def teacher(self, anchor: Tensor, server_state: rules.State) -> Tensor:
        return anchor

    def distil(self, outputs: Tensor, taught: Tensor) -> Tensor:
        return (outputs - taught).square().sum() if outputs.sum() > 0 else outputs.sum()


def test_a_teacher_that_reads_is_found() -> None:
    with pytest.raises(ValueError, match=r"Distils.* reads a number of a vector on the host"):
        rules.check_on_device(fedlesam.Algorithm(perturbation=Distils()))


@dataclass(frozen=True)
class Sends(rules.Perturbation):
    gradient = "current"
    how: str = "to"

    def ascend(self, gradient: Tensor, step: rules.Step) -> Tensor:
        if self.how == "number":
            return gradient * torch.tensor(0.1)
        if self.how == "tensor":
            return gradient * torch.tensor(data=0.1, device=gradient.device)
        mask = torch.ones(len(gradient))
        return gradient * (mask.to(gradient) if self.how == "to" else gradient.new_tensor([0.1] * len(gradient)))


@pytest.mark.parametrize("how", ["to", "tensor", "new_tensor"])
def test_a_rule_that_sends_a_tensor_in_every_step_is_found(how: str) -> None:
    with pytest.raises(ValueError, match=f"Sends.*{how}.* sends a tensor from the host in every step"):
        rules.check_on_device(fedlesam.Algorithm(perturbation=Sends(how)))


@dataclass(frozen=True)
class Draws(rules.Perturbation):
    gradient = "current"
    there: bool = True

    def ascend(self, gradient: Tensor, step: rules.Step) -> Tensor:
        e = torch.randn_like(gradient) if self.there else torch.randn(gradient.shape)
        return e * (0.1 / e.norm())


@pytest.mark.parametrize("there", [True, False])
def test_a_rule_that_draws_by_itself_is_found(there: bool) -> None:
    with pytest.raises(
        ValueError, match=r"Draws.* draws random numbers of its own .*randn.*`draws = True` .*step\.noise"
    ):
        rules.check_on_device(fedlesam.Algorithm(perturbation=Draws(there)))


@dataclass(frozen=True)
class DrawsOnce(rules.Perturbation):
    draws: bool = False

    def round_perturbation(self, anchor: Tensor, client_state: rules.State, server_state: rules.State) -> Tensor:
        return 0.1 * torch.randn_like(anchor)


def test_a_rule_that_draws_at_the_start_of_a_round_is_found() -> None:
    """Unless it says so: then it is seeded."""
    rules.check_on_device(fedlesam.Algorithm(perturbation=DrawsOnce(True)))
    with pytest.raises(ValueError, match=r"DrawsOnce.* draws random numbers of its own .*randn.*`draws = True`"):
        rules.check_on_device(fedlesam.Algorithm(perturbation=DrawsOnce()))


def test_a_number_that_goes_with_the_call_is_none() -> None:
    rules.check_on_device(fedlesam.Algorithm(perturbation=Sends("number")))
