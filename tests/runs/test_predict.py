"""What a run will cost, before it is run: held against runs; and where it runs."""

import dataclasses
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import types
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from worlds import SIZES, Listed, federate, federation, samples, training

from fedlesam import Execution, Federation, LocalTraining
from fedlesam.algorithms import CATALOGUE, Algorithm
from fedlesam.core.space import size
from fedlesam.engines.settings import find_device
from fedlesam.rules import Perturbation
from fedlesam.runs import config as configs
from fedlesam.runs import costs
from fedlesam.runs.build import build
from fedlesam.runs.config import RunConfig
from fedlesam.runs.costs import PROCESS_BYTES, Prediction, anchors_alive, check_fits, predict
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.kinds import byte_size
from fedlesam.runs.runner import execute

GB = 10**9


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))


def make(name: str, *, sizes: tuple[int, ...] = (7, 12, 5, 9, 16, 3), **settings: Any) -> Federation:
    local = settings.pop("local", training(epochs=2))
    clients = settings.pop("clients", None) or samples(sizes, dtype=torch.float32)
    return federation(name, model=network(), clients=clients, local=local, **settings)


def config(**change: Any) -> RunConfig:
    return RunConfig(**{"rounds": 4, **change})


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name not in ("fedgf", "fedwmsam", "dp-fedsam")])
def test_a_prediction_is_what_a_run_does(name: str) -> None:
    """Every client active, of unequal sizes, BatchNorm's statistics in the messages: all of it exact."""
    fed = make(name)
    predicted = predict(config(), fed)
    record = list(fed.run(4))[-1]
    assert predicted.parameters == len(fed.weights)
    assert (predicted.clients, predicted.active) == (6, 6)
    assert predicted.backward_passes_per_round == record.backward_passes
    assert predicted.bytes_down_per_round == record.bytes_down
    assert predicted.bytes_up_per_round == record.bytes_up
    assert {predicted.one_client} == {memory.nbytes for memory in fed.memories.values()}
    assert predicted.client_memory == fed.memories.nbytes


@pytest.mark.parametrize("name", ["fedgf", "fedwmsam"])
def test_single_numbers_are_left_out_of_a_prediction(name: str) -> None:
    fed = make(name)
    predicted, record = predict(config(), fed), list(fed.run(2))[-1]
    assert 0 < record.bytes_down - predicted.bytes_down_per_round <= 6 * 4 * 31
    assert 0 <= record.bytes_up - predicted.bytes_up_per_round <= 6 * 4
    assert 0 <= fed.memories.nbytes - predicted.client_memory <= 6 * 4


@pytest.mark.parametrize("name", ["fedsam", "fedlesam-s"])
def test_a_part_of_the_clients(name: str) -> None:
    """Of equal size: every round costs the same."""
    fed = make(name, sizes=(8,) * 9, active=3)
    predicted = predict(config(), fed)
    record = list(fed.run(4))[-1]
    assert predicted.backward_passes_per_round == record.backward_passes
    assert predicted.bytes_down_per_round == record.bytes_down
    assert predicted.bytes_up_per_round == record.bytes_up


def test_epochs_drawn_from_a_range_count_by_their_mean() -> None:
    one, drawn = (predict(config(), make("fedsam", local=training(epochs=e))) for e in (2, range(1, 4)))
    assert one.backward_passes_per_round == drawn.backward_passes_per_round


class Live(TorchDispatchMode):
    """The most bytes of tensors that were there at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in (leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.held:
                self.held[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.held.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.held.values()))
        return out


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedlesam-s", "fedsmoo", "fedgmt", "fedsol", "random-step"])
def test_rows_of_a_stack(name: str) -> None:
    """What a client more takes: its row, and what it remembers before and after the round."""

    def stacked(clients: int) -> Federation:
        model = nn.Sequential(nn.Linear(5, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 3))
        data = samples((4,) * clients, dtype=torch.float32)
        return federation(name, model=model, clients=data, local=training(epochs=2), engine="stacked")

    peaks, predicted = [], []
    for clients in (4, 12):
        fed = stacked(clients)
        with Live() as live:
            for _ in range(2):
                fed.round()
        peaks.append(live.peak)
        predicted.append(predict(config(), stacked(clients)).gpu)
    assert peaks[1] - peaks[0] == pytest.approx(predicted[1] - predicted[0], rel=0.1)


class Made(Sequence[Any]):
    """A million clients, made when they are drawn; as the documentation shows it, it never says where they end."""

    def __init__(self) -> None:
        self.made: set[int] = set()

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, client: Any) -> Any:
        self.made.add(client)
        assert len(self.made) < 1010, "a thousand are looked at to tell one run's data from another's"
        return torch.ones(4, 5), torch.zeros(4).long()


@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_clients_that_are_made_when_they_are_drawn_are_not_made_for_it(engine: Any, tmp_path: Path) -> None:
    clients = Made()
    execution = Execution(engine=engine, threads=1)
    fed = Federation(
        nn.Linear(5, 3), clients, "fedlesam-s", training(epochs=2, batch_size=2), active=3, execution=execution
    )
    fed.fit(2, out=tmp_path / "run", progress=False)
    before = len(clients.made)
    assert predict(config(), fed).backward_passes_per_round == 3 * 2 * 2
    assert len(clients.made) == before


@pytest.mark.parametrize("listed", [True, False])
def test_all_clients_of_a_list_count_however_many(listed: bool) -> None:
    """Of a tuple, too; they are there."""
    sizes = (40, *[4] * 10_000)
    clients = samples(sizes, dtype=torch.float32)
    fed = make(
        "fedavg", local=training(epochs=1, batch_size=4), clients=clients if listed else tuple(clients), active=10
    )
    assert predict(config(), fed).backward_passes_per_round == pytest.approx(10 * (10 + 10_000) / 10_001)


def test_stacks_of_equal_size_are_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = federation("fedavg", clients=samples((6,) * 7), engine="stacked")
    monkeypatch.setattr("fedlesam.engines.stacked.LARGEST", 5 * len(fed.weights))
    assert costs._rows(fed) == 4, "two stacks, of 4 and 3"


def test_the_remedy_of_runs_that_share_a_stack() -> None:
    settings = config(stack_runs=80, active=5, rounds=100, memory=10**9)
    predicted = dataclasses.replace(predict(settings, make("scaffold")), active=5, ram=2 * GB, client_memory=10**8)
    predicted = dataclasses.replace(predicted, disk=2 * 4 * predicted.parameters, one_client=10**4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "available_ram", lambda: GB)
        with pytest.raises(ValueError, match=r"it would fit with --memory 18\.8MB"):
            check_fits(predicted, settings, Path())
        patch.setattr(costs, "available_ram", lambda: 10**8)
        with pytest.raises(ValueError, match="it would fit with fewer --stack-runs or a smaller model"):
            check_fits(predicted, settings, Path())


def test_samples_of_datasets_do_not_lie_on_a_gpu() -> None:
    """They are made and sent batch by batch."""
    clients = samples((9, 4), dtype=torch.float32)
    few = predict(config(), make("fedavg", clients=clients)).gpu
    many = predict(config(), make("fedavg", clients=[Listed(*client) for client in clients])).gpu
    assert few - many == 9 * (5 * 4 + 8)


def test_rules_that_fail_are_named_at_once() -> None:
    """Before anything is trained, and not as clients that failed."""
    with pytest.raises(
        ValueError,
        match=r"the rules of .*Fails.* fail on a model of one layer: TypeError: .*, in Fails\.ascend of test_pred",
    ):
        costs.measure(Algorithm(perturbation=Fails()))


@dataclasses.dataclass(frozen=True)
class Fails(Perturbation):
    gradient = "current"

    def ascend(self, gradient: Tensor, step: Any) -> Any:
        return step.noise * 2  # it does not say that it draws


def test_half_precision_has_a_copy_of_its_own() -> None:
    plain, half = (predict(config(), make("fedavg", precision=how)) for how in ("fp32", "bf16-pure"))
    assert half.gpu - plain.gpu == 4 * plain.parameters, "weights and gradients, two bytes each"


def test_the_summary_of_a_run_agrees(tmp_path: Path) -> None:
    small: dict[str, Any] = {"clients": 4, "active": 4, "rounds": 2, "epochs": 1, "model": "mlp:hidden=4"}
    settings = configs.resolve(RunConfig(algorithm="fedsmoo", **small))
    predicted = predict(settings, build(settings).federation)
    summary = execute(settings, tmp_path / "run")
    last = RunFolder(tmp_path / "run").read_metrics()[-1]
    assert summary["client_memory_bytes"] == predicted.one_client
    assert summary["parameters"] == predicted.parameters
    assert last["backward_passes"] == predicted.backward_passes_per_round
    assert (last["bytes_down"], last["bytes_up"]) == (predicted.bytes_down_per_round, predicted.bytes_up_per_round)


@pytest.mark.parametrize(("clients", "active", "rounds"), [(20, 4, 60), (50, 5, 12), (30, 1, 200), (24, 8, 30)])
def test_models_that_are_still_kept(clients: int, active: int, rounds: int) -> None:
    """The expectation against the participation that federations draw, over 60 seeds.

    It takes clients to be drawn independently, which they are not quite: 4 % on top of the error of the mean.
    """
    counts, data = [], [(torch.ones(1, 1), torch.zeros(1).long())] * clients
    for seed in range(60):
        fed = Federation(nn.Linear(1, 2), data, active=active, seed=seed)
        last = {client: t for t in range(rounds) for client in fed.draw_active(t)}
        counts.append(len(set(last.values())))
    mean, error = statistics.mean(counts), statistics.stdev(counts) / math.sqrt(len(counts))
    assert abs(mean - anchors_alive(clients, active, rounds)) < 4 * error + 0.04 * mean


def test_memory_with_a_part_of_the_clients() -> None:
    """Private vectors to the byte; the shared ones as many as there are rounds that somebody last took part in."""
    fed = make("fedlesam-s", sizes=(6,) * 12, active=3, local=training(epochs=1))
    unit = fed.weights.nbytes
    for record in fed.run(30):
        kept = len(set(fed.memories.rounds.values()))
        assert fed.memories.nbytes == (len(fed.memories) + kept) * unit, record
    assert len(fed.memories) == 12
    predicted = predict(dataclasses.replace(config(), rounds=30), fed)
    assert predicted.client_memory == 12 * unit + round(anchors_alive(12, 3, 30) * unit)


def test_ten_thousand_clients() -> None:
    """Memory in proportion to those ever active: an N x D table would be 400 MB for each kept vector."""
    x, y = torch.randn(2, 500), torch.tensor([0, 1])
    fed = Federation(nn.Linear(500, 20), [(x, y)] * 10_000, "fedlesam-s", LocalTraining(epochs=1), active=100)
    before = anonymous()
    records = list(fed.run(3))
    ever = {client for record in records for client in record.active}
    assert list(fed.memories) == sorted(ever)
    assert 250 < len(ever) <= 300
    assert fed.memories.nbytes <= (len(ever) + 3) * fed.weights.nbytes
    assert anonymous() - before < 2 * fed.memories.nbytes + 30_000_000
    predicted = predict(config(rounds=3), fed)
    assert predicted.client_memory <= (300 + 3) * fed.weights.nbytes


def anonymous() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


# A run that does not fit


def big(**change: Any) -> tuple[RunConfig, Prediction]:
    """Many clients that keep a model of a megabyte; nothing of it is trained."""
    settings = dataclasses.replace(RunConfig(), rounds=1000, **change)
    clients = [(torch.ones(1, 500), torch.zeros(1).long())] * 2000
    fed = federate(
        nn.Linear(500, 500, bias=False), clients, "scaffold", active=10, workers=settings.workers, store=settings.store
    )
    return settings, predict(settings, fed)


def free(monkeypatch: pytest.MonkeyPatch, ram: float = 10**12, disk: float = 10**13) -> None:
    monkeypatch.setattr(costs, "available_ram", lambda: int(ram))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=int(disk)))


def test_memory_is_in_ram_up_to_the_budget_and_else_on_disk() -> None:
    for budget in (0, GB, 4 * GB):
        predicted = big(memory=budget)[1]
        assert predicted.client_memory == 2000 * 10**6
        assert predicted.one_client == 10**6
        assert predicted.disk == max(0, 2 * GB - budget) + 2 * 10**6
        assert 0 < predicted.ram - min(budget, 2 * GB) - PROCESS_BYTES < 30 * 10**6
    shared, pinned = (big(memory=4 * GB, workers=2, store=store)[1] for store in ("shared", "pinned"))
    assert shared.disk - 2 * 10**6 == 2 * GB
    assert shared.ram < 2 * PROCESS_BYTES + 40 * 10**6
    assert pinned.disk == 2 * 10**6
    assert pinned.ram > 2 * GB + 2 * PROCESS_BYTES


def test_pinned_workers_keep_a_model_each() -> None:
    alone = anchors_alive(100, 10, 500)
    assert alone < anchors_alive(100, 10, 500, holders=2) <= 2 * alone
    assert anchors_alive(100, 10, 500, holders=10) == pytest.approx(100, rel=0.01), "one of each client's own"
    assert anchors_alive(100, 10, 500, holders=64) == anchors_alive(100, 10, 500, holders=10)


def test_a_machine_counts_its_own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    all_here = big(workers=8)[1]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert all_here.ram - big(workers=8)[1].ram == pytest.approx(6 * PROCESS_BYTES, rel=0.05)


def named(message: str) -> int:
    return int(configs.parse("memory", re.search(r"--memory (\S+?)$", message)[1], "--memory"))  # type: ignore[index]


@pytest.mark.parametrize("ram", [1.0 * GB, 0.5 * GB, 0.330 * GB, 0.3265 * GB])
def test_too_little_ram(ram: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free(monkeypatch, ram=ram)
    settings, predicted = big()
    with pytest.raises(ValueError, match=rf"needs {size(predicted.ram)} of RAM, {size(ram)} are free") as refused:
        check_fits(predicted, settings, tmp_path)
    settings, predicted = big(memory=named(str(refused.value)))
    check_fits(predicted, settings, tmp_path)


def test_no_budget_helps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free(monkeypatch, ram=PROCESS_BYTES)
    settings, predicted = big(workers=2)
    with pytest.raises(ValueError, match="fewer --workers or a smaller model"):
        check_fits(predicted, settings, tmp_path)


def test_too_little_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """2 GB of memory: a checkpoint has all of it, and every kept one may have another version of it."""
    missing = tmp_path / "not" / "there"
    settings, predicted = big(memory=4 * GB)
    assert 2 * GB < predicted.checkpoint < 2.01 * GB
    assert predicted.checkpoints == 3 * predicted.checkpoint
    need = predicted.disk + predicted.checkpoints
    free(monkeypatch, disk=need)
    check_fits(predicted, settings, missing)
    free(monkeypatch, disk=need - 1)
    with pytest.raises(
        ValueError, match=r"needs 2MB of disk in .*there and up to 6.01GB for checkpoints.*or --keep 1$"
    ):
        check_fits(predicted, settings, missing)
    check_fits(*reversed(big(memory=4 * GB, keep=1)), missing)
    free(monkeypatch, disk=GB)
    with pytest.raises(ValueError, match=r"1GB are free: choose another --out$"):
        check_fits(predicted, settings, missing)


def test_checkpoints_share_what_does_not_change() -> None:
    """10 of 2,000 clients are active: after 20 rounds at most a tenth has changed; half of the files may be dead."""
    predicted = big(memory=4 * GB, checkpoint_every=20)[1]
    server = predicted.checkpoint - predicted.client_memory
    changed = 2 * (predicted.client_memory // 10 + server)
    assert predicted.checkpoints == predicted.checkpoint + predicted.client_memory + changed


def test_a_budget_below_one_client(tmp_path: Path) -> None:
    settings, predicted = big(memory=999_000)
    with pytest.raises(ValueError, match=r"--memory 999kB cannot hold the memory of one client, 1MB: .*or 0"):
        check_fits(predicted, settings, tmp_path)
    for enough in (0, 10**6):
        check_fits(*reversed(big(memory=enough)), tmp_path)


def test_a_run_that_does_not_fit_does_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free(monkeypatch, ram=10**6)
    settings = configs.resolve(RunConfig(clients=4, active=4, rounds=1, epochs=1, model="mlp:hidden=4"))
    with pytest.raises(ValueError, match="of RAM"):
        execute(settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_this_machine_has() -> None:
    ram = costs.available_ram()
    assert ram is None or 10**7 < ram < 10**14


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0B"), (999, "999B"), (1000, "1kB"), (999_900, "1MB"), (10**9, "1GB"), (1.5e6, "1.5MB"), (5e15, "5000TB")],
)
def test_sizes(count: float, text: str) -> None:
    assert size(count) == text
    if count >= 1:
        assert byte_size(text) == pytest.approx(count, rel=0.005)


# Where it runs

DEVICES = "cpu", "cuda"


def test_devices_there_are() -> None:
    assert find_device("cpu") == torch.device("cpu")
    assert find_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("device", ["nonsense", "mps", "cpu:x", "", "meta", "cuda:-1"])
def test_devices_that_are_nonsense(device: str) -> None:
    with pytest.raises(ValueError, match=rf"device '{device}': expected auto, cpu, cuda or cuda:i"):
        find_device(device)


def test_why_there_is_no_mps() -> None:
    with pytest.raises(
        ValueError, match=r"mps has no float64, in which means over clients and norms are computed: use cpu$"
    ):
        find_device("mps")


@pytest.mark.parametrize("device", ["gpu", "GPU:0"])
def test_a_gpu_by_another_name(device: str) -> None:
    with pytest.raises(ValueError, match="did you mean cuda"):
        find_device(device)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:99"])
@pytest.mark.parametrize(
    ("built_with", "why"),
    [
        (None, f"(torch {torch.__version__} is built without CUDA): install a build with it, or use cpu"),
        ("12.8", "(no driver, no device, or CUDA_VISIBLE_DEVICES hides it): see nvidia-smi, or use cpu"),
    ],
)
def test_a_gpu_that_is_not_there(
    device: str, built_with: str | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", built_with)
    with pytest.raises(ValueError) as refused:
        find_device(device)
    assert str(refused.value) == f"device '{device}': PyTorch sees no GPU {why}"


def test_a_gpu_for_each_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert find_device("cuda") == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert find_device("cuda") == torch.device("cuda", 2)
    assert find_device("cuda:1") == torch.device("cuda", 1)


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [1, 2])
def test_cuda_is_close_to_cpu(workers: int, tmp_path: Path) -> None:
    """Two workers on one GPU too: messages go over gloo."""
    small: dict[str, Any] = {"clients": 4, "active": 4, "rounds": 2, "epochs": 1, "algorithm": "fedlesam-s"}
    results = []
    for device in ("cpu", "cuda"):
        settings = configs.resolve(RunConfig(device=device, workers=workers if device == "cuda" else 1, **small))
        execute(settings, tmp_path / device)
        results.append(RunFolder(tmp_path / device).read_metrics()[-1]["train_loss"])
    assert results[0] == pytest.approx(results[1], rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("how", [{"engine": "stacked"}, {"stack_runs": 8}], ids=str)
@pytest.mark.parametrize("method", ["fedavg", "fedsam", "fedlesam-s", "random-step"])
def test_stacks_on_a_gpu_are_close_to_the_cpu(method: str, how: dict[str, Any]) -> None:
    """Uncompiled, often enough for steps to be recorded where they are; in float64, so that rounding is all."""
    clients = samples((8, 8, 8, 5))
    one, other = (
        federation(method, clients=clients, local=training(epochs=4), device=device, threads=1, **how)
        for device in DEVICES
    )
    for _ in range(15):
        here, there = one.round(range(4)), other.round(range(4))
        assert there.train_loss == pytest.approx(here.train_loss, rel=1e-8, abs=1e-10)
    torch.testing.assert_close(other.weights.cpu(), one.weights, rtol=1e-8, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("how", [{}, {"engine": "stacked"}], ids=str)
def test_evaluation_on_a_gpu_is_close_to_the_cpu(how: dict[str, Any]) -> None:
    """On the common test data, and over clients with test samples of their own."""
    held = samples((40, 9, 3, 12, 7, 5), seed=3)
    data: dict[str, Any] = {"test": held[0], "test_clients": held[1:], "clients": samples(SIZES[1:])}
    one, other = (federation("fedlesam", device=device, threads=1, **data, **how) for device in DEVICES)
    for _ in range(2):
        here, there = one.round([0, 1]), other.round([0, 1])
        assert there.test_loss == pytest.approx(here.test_loss, rel=1e-9)
        assert there.metrics == pytest.approx(here.metrics) != {}
        assert set(there.test_clients) == set(here.test_clients) != set()
        for name, mine in here.test_clients.items():
            assert vars(there.test_clients[name]) == pytest.approx(vars(mine))


compiles = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")

COMPILED = """
import torch
from fedlesam import Execution, Federation, LocalTraining
from fedlesam.models.catalogue import make_model
torch.manual_seed(0)
clients = [(torch.randn(8, 1, 8, 8), torch.randint(3, (8,))) for _ in range(3)]
def train(**settings):
    model = make_model("cnn", (1, 8, 8), 3, 0)
    local = LocalTraining(epochs=1, batch_size=4)
    execution = Execution(threads=1, **settings)
    with Federation(model, clients, "fedlesam-s", local, test=clients[0], execution=execution) as fed:
        fed.round(), fed.round()
        return fed.weights
plain, compiled = train(), train(compile=True)
torch.testing.assert_close(plain, compiled, rtol=1e-3, atol=1e-5)
print("close", torch.equal(plain, compiled))
"""


@compiles
@pytest.mark.slow
def test_compiled_is_close_to_plain(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "close" in done.stdout


def test_compile_with_several_workers_is_refused() -> None:
    """The compiler's threads and locks do not survive a fork: it would hang."""
    client = (torch.ones(2, 3), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"compile does not work with several workers.*torchrun"):
        federate(torch.nn.Linear(3, 2), [client], compile=True, workers=2)


def test_compile_with_workers_that_are_new_processes() -> None:
    """On GPUs, and with several threads; they compile for themselves."""
    Execution(compile=True, workers=2).check_fork(torch.device("cuda", 0))
    federate(torch.nn.Linear(3, 2), [(torch.ones(2, 3), torch.zeros(2).long())], compile=True, workers=2, threads=2)
