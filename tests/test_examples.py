"""Examples and documents are executed, and measured tables are compared with what they measure."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fedlesam as fl
from fedlesam import algorithms

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ["README.md", "docs/tour.md", "docs/add-a-rule.md", "docs/probes.md", "docs/tasks.md"]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_python_blocks_of_a_document(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a document, top to bottom, in one namespace and an empty folder."""
    text = (ROOT / name).read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    if not blocks:
        pytest.skip(f"{name} has no python blocks")
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "document"}
    monkeypatch.setitem(sys.modules, "document", type(sys)("document"))  # dataclasses look their module up
    for block in blocks:
        above = text.count("\n", 0, block.start(1))
        exec(compile("\n" * above + block[1], name, "exec"), namespace)


def test_my_rule_as_a_script(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, ROOT / "examples" / "my_rule.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    accuracy = [float(line.split()[-1]) for line in run.stdout.splitlines() if line.startswith("round")]
    assert len(accuracy) == 10
    assert accuracy[-1] > 0.5


def test_my_rule_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(ROOT / "examples" / "my_rule.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_rule", raising=False)
    algorithm = algorithms.get("my_rule:my_method", rho=0.25)
    assert "ScaledAscent(rho=0.25)" in repr(algorithm)
    assert Path(sys.modules["my_rule"].__file__ or "").parent == tmp_path
    del sys.modules["my_rule"]


def trained(algorithm: fl.Algorithm, rounds: int = 4, **local: Any) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    clients = [(torch.randn(9, 4, generator=draw), torch.randint(3, (9,), generator=draw)) for _ in range(3)]
    torch.manual_seed(0)
    training = fl.LocalTraining(epochs=2, batch_size=4, **local)
    federation = fl.Federation(torch.nn.Linear(4, 3), clients, algorithm, training, active=2)
    assert [record.round for record in federation.run(rounds)] == [*range(rounds)]
    return federation.weights


def test_my_rules_reduce_to_fedavg() -> None:
    """rho = 0, alpha = 1 and beta = 0 switch the three rules off."""
    my_method = runpy.run_path(str(ROOT / "examples" / "my_rule.py"))["my_method"]
    torch.testing.assert_close(trained(my_method(rho=0.0, alpha=1.0, beta=0.0)), trained(fl.algorithms.fedavg()))


FREE = runpy.run_path(str(ROOT / "examples" / "free_rules.py"))


@pytest.mark.parametrize(
    ("base", "names"),
    [
        ("fedavg", ["momentum", "round_back", "old_back", "falling", "growing"]),
        ("scaffold", ["momentum_s", "step_back_s", "round_back_s"]),
        ("feddyn", ["momentum_d", "step_back_d", "round_back_d"]),
    ],
)
def test_the_free_rules_are_their_bases_with_a_perturbation(base: str, names: list[str]) -> None:
    for name in names:
        torch.testing.assert_close(trained(FREE[name](rho=0.0)), trained(algorithms.get(base)), msg=name)
        assert (trained(FREE[name](rho=0.3)) - trained(algorithms.get(base))).abs().max() > 1e-3, name


def test_the_free_rules_at_their_limits() -> None:
    """Each is a known method where its idea makes no difference."""
    freesam, plain = trained(fl.algorithms.freesam(rho=0.3)), {"weight_decay": 0.0, "clip": None}
    torch.testing.assert_close(trained(FREE["momentum"](rho=0.3, beta=0.0)), freesam)
    step_back = fl.Algorithm(FREE["StepBackAscent"](0.3))
    torch.testing.assert_close(trained(step_back, **plain), trained(fl.algorithms.freesam(rho=0.3), **plain))
    torch.testing.assert_close(trained(FREE["old_back"](rho=0.3), 1), trained(FREE["round_back"](rho=0.3), 1))
    fedlesam = trained(fl.algorithms.fedlesam(rho=0.3))
    torch.testing.assert_close(trained(FREE["falling"](rho=0.3, rounds=10**9)), fedlesam)
    torch.testing.assert_close(trained(FREE["growing"](rho=0.3, rounds=10**9)), trained(fl.algorithms.fedavg()))


def test_the_table_of_the_design_is_what_is_measured() -> None:
    table = runpy.run_path(str(ROOT / "docs" / "scripts" / "catalogue_table.py"))["table"]()
    written = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").splitlines()
    missing = [line for line in table if line not in written]
    assert not missing, "run `python docs/scripts/catalogue_table.py` and put its table into docs/design.md"


def test_the_shifted_start() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "scripts" / "shifted_start.py"))
    for make, scope in ((fl.algorithms.fedlesam_s, "loss"), (fl.algorithms.fedlesam_d, "corrected")):
        assert script["difference"](make(rho=0.1), scope) < 2e-5
    count = script["operations_of_an_epoch"]
    operations = count(fl.algorithms.fedavg())
    assert operations == count(fl.algorithms.fedlesam())
    number = operations.total()
    assert f"FedAvg {number} and FedLESAM {number}" in (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
