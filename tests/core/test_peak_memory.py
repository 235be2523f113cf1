"""The most memory of a round, in vectors of the model's size, by the benchmark's own script in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from worlds import federation

from fedlesam.core.shell import Shell

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "memory.py"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize(("method", "most"), [pytest.param("fedavg", 10, marks=pytest.mark.slow), ("scaffold", 21)])
def test_vectors_at_once(method: str, most: float) -> None:
    """8 of SCAFFOLD's are the four c_i before and after the round. Freed blocks go back, as a large model's do."""
    command = [sys.executable, str(SCRIPT), "--one", method, "--weights", "8000000"]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(SCRIPT.parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if "clear_refs" in done.stderr:
        pytest.skip("the peak cannot be reset here")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["second"] <= most
    assert found["after second"] < found["second"] - 3


def test_a_shell_holds_no_weights() -> None:
    module = nn.Sequential(nn.Linear(30, 20), nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.Linear(2, 2))
    module[2].weight.requires_grad_(False)
    module[0].weight.grad = torch.ones(20, 30)
    weights = [p.detach().clone() for p in module.parameters() if p.requires_grad]
    strides = [p.stride() for p in module.parameters()]
    frozen = module[2].weight.clone()
    shell = Shell(module)
    held = [p.untyped_storage().nbytes() for p in module.parameters() if p.requires_grad]
    assert max(held) <= 4
    one, other = shell.filled(weights, {}), shell.filled(weights, {})
    assert [p.stride() for p in one.parameters()] == strides
    assert all(p.grad is None for p in one.parameters())
    for p, weight in zip([p for p in one.parameters() if p.requires_grad], weights, strict=True):
        assert torch.equal(p, weight)
    assert torch.equal(one[2].weight, frozen)
    with torch.no_grad():
        one[0].weight.zero_()
    assert torch.equal(other[0].weight, weights[0])


def test_a_federation_keeps_one_module_with_weights() -> None:
    fed = federation("fedavg")
    assert all(p.untyped_storage().nbytes() <= 8 for p in fed._shell.module.parameters())
    assert sum(p.numel() for p in fed.model.parameters()) == fed.weights.numel()
