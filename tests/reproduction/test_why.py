"""Where perturbations point: what must hold by construction, and all of it at the smallest scale."""

from pathlib import Path

import pytest
import torch

import fedlesam as fl
from reproduction import why
from reproduction.scales import SCALES
from reproduction.studies import Where


def federation(name: str, **hyper: float) -> fl.Federation:
    rng = torch.Generator().manual_seed(0)
    clients = [(torch.randn(8, 4, generator=rng), torch.randint(0, 3, (8,), generator=rng)) for _ in range(4)]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    local = fl.LocalTraining(batch_size=8, epochs=3, weight_decay=0.0, clip=None)
    return fl.Federation(model, clients, fl.algorithms.get(name, **hyper), local, test=clients[0])


def test_sam_ascends_the_client_and_fedlesam_takes_the_last_step_back() -> None:
    """A batch of all samples: SAM's e is the client's gradient. All clients are active: old is the last model."""
    sam, ours = federation("fedsam", rho=1e-4), federation("fedlesam", rho=1e-4)
    for fed, name, expected in ((sam, "e, gradient of the client", 1.0), (ours, "e, last global step", -1.0)):
        fed.round()
        previous = fed.weights
        fed.round()
        before = fed.weights
        values = why.measure(fed, previous)[name]
        assert values == pytest.approx([expected] * 12, abs=1e-4)
        assert torch.equal(before, fed.weights), "measuring changes nothing"


def test_all_of_it_at_the_smallest_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(why, "SHOWN", ("fedsam", "fedlesam"))
    table = why.run(Where(SCALES["smoke"]), tmp_path, lambda _: None)
    assert list(table.blocks[0].rows) == ["fedsam", "fedlesam", "rank correlation with the gain"]
    assert "e, global gradient" in (tmp_path / "claim-why.md").read_text()
