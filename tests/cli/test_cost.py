"""`fedlesam cost`, and the flags of the machine."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from command_line import Call
from domain_files import write_known
from text_files import write_lines, write_roles

from fedlesam.data import load
from fedlesam.data.catalogue import DOMAIN_SETS, NAMES
from fedlesam.data.dataset import select
from fedlesam.data.formats import find
from fedlesam.data.stand_in import is_public, stand_in
from fedlesam.runs import costs

SMALL = ["--clients", "6", "--active", "3", "--epochs", "1", "--batch-size", "50", "--model", "mlp:hidden=4"]


def as_json(call: Call, *flags: str) -> dict[str, Any]:
    code, out, err = call("cost", *SMALL, *flags, "--json")
    assert code == 0, err
    return dict(json.loads(out))


def test_cost_is_for_people(call: Call, tmp_path: Path) -> None:
    code, out, err = call("cost", *SMALL, "--algorithm", "fedlesam-s", "--rounds", "40", "--memory", "1GB")
    assert (code, err) == (0, "")
    rows = dict(line.split(":", 1) for line in out.splitlines())
    rows = {name: value.strip() for name, value in rows.items()}
    assert rows["model"] == "310 parameters"
    assert rows["clients"] == "6, 3 active a round"
    assert rows["sent to clients"] == "7.44kB a round", "3 clients x 2 vectors x 310 numbers x 4 bytes"
    assert rows["one client keeps"] == "2.48kB"
    assert rows["RAM"].endswith("clients' memory above 1GB goes to files")
    assert rows["all clients keep"].endswith("in the end, what clients of one round share counted once")
    assert set(rows) >= {"backward passes", "sent by clients", "all clients keep", "disk"}
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_methods_without_memory_say_so(call: Call) -> None:
    out = call("cost", *SMALL, "--algorithm", "fedavg")[1]
    assert "one client keeps:   nothing" in out
    assert "all clients keep:   nothing" in out


def test_cost_is_for_scripts(call: Call) -> None:
    found = as_json(call, "--algorithm", "fedlesam-s", "--rounds", "40")
    assert found["parameters"] == 310
    assert (found["clients"], found["active"]) == (6, 3)
    assert found["bytes_down_per_round"] == found["bytes_up_per_round"] == 3 * 2 * 310 * 4
    assert found["one_client"] == 2 * 310 * 4
    assert set(found) == {
        "parameters", "clients", "active", "backward_passes_per_round", "bytes_down_per_round", "bytes_up_per_round",
        "one_client", "client_memory", "ram", "gpu", "disk", "checkpoint", "checkpoints",
    }  # fmt: skip


def test_cost_foresees_the_run(call: Call, tmp_path: Path) -> None:
    """The same flags: the run's own figures."""
    flags = ["--algorithm", "fedsmoo", "--active", "6", "--rounds", "2"]
    found = as_json(call, *flags)
    code, out, _ = call("run", *SMALL, *flags, "--out", "run", "--json")
    summary = json.loads(out)
    assert code == 0
    assert summary["parameters"] == found["parameters"]
    assert summary["client_memory_bytes"] == found["one_client"]
    assert summary["backward_passes"] == 2 * found["backward_passes_per_round"]
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["bytes_up"] == found["bytes_up_per_round"]
    assert last["bytes_down"] == found["bytes_down_per_round"]


def test_workers_and_budget_move_memory(call: Call) -> None:
    flags = ["--algorithm", "scaffold", "--rounds", "100"]
    ram, none = as_json(call, *flags), as_json(call, *flags, "--memory", "0")
    shared = as_json(call, *flags, "--workers", "2")
    assert ram["client_memory"] == none["client_memory"] == 6 * 310 * 4
    assert none["disk"] - ram["disk"] == shared["disk"] - ram["disk"] == ram["client_memory"]
    assert shared["ram"] > ram["ram"] + costs.PROCESS_BYTES


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--memory", "lots"], "--memory: expected a size such as 4GB"),
        (["--memory", "2kB"], "--memory 2kB cannot hold the memory of one client, 2.48kB"),
        (["--device", "nonsense"], "device 'nonsense': expected auto, cpu, cuda or cuda:i"),
        (["--device", "cuda:99"], "use cpu"),
        (["--store", "cloud"], "--store: expected one of 'shared', 'pinned', got 'cloud'"),
        (["--precision", "fp8"], "--precision: expected one of 'fp32', 'tf32', 'bf16', 'bf16-pure', got 'fp8'"),
        (["--workers", "0"], "workers must be a whole number from 1, got 0"),
        (["--memory", "-1"], "--memory: expected a size"),
    ],
)
def test_bad_flags_of_the_machine(flags: list[str], says: str, call: Call, tmp_path: Path) -> None:
    code, out, err = call("run", *SMALL, "--algorithm", "fedlesam-s", "--rounds", "1", *flags, "--out", "run")
    assert (code, out) == (2, "")
    assert says in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_beside_a_leader_nothing_is_said(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun starts the same command several times: one of them says what is wrong with it."""
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        code, out, err = call("run", "--epochs", "nonsense")
        assert (code, out, len(err.splitlines())) == (2, "", lines)


def test_devices_that_work(call: Call, tmp_path: Path) -> None:
    for device in ("auto", "cpu"):
        code, _, err = call("run", *SMALL, "--rounds", "1", "--device", device, "--out", device, "-q")
        assert code == 0, err
    assert 'device = "auto"' not in (tmp_path / "auto" / "config.toml").read_text()


def test_a_run_that_does_not_fit_says_what_would(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = as_json(call, "--algorithm", "scaffold", "--rounds", "100")
    flags = ["--algorithm", "scaffold", "--rounds", "100", "--out", "run", "-q"]
    monkeypatch.setattr(costs, "available_ram", lambda: needed["ram"] - 5000)
    code, _, err = call("run", *SMALL, *flags)
    assert code == 2
    assert "it would fit with --memory 0" in err or "it would fit with --memory 1" in err
    assert not (tmp_path / "run").exists()
    budget = err.split("--memory ")[1].strip()
    code, _, err = call("run", *SMALL, *flags, "--rounds", "1", "--memory", budget)
    assert code == 0, err


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_tf32_is_said_to_do_nothing_on_a_cpu(call: Call, precision: str) -> None:
    code, out, err = call("run", *SMALL, "--rounds", "1", "--precision", precision, "--device", "cpu", "--out", "run")
    assert code == 0, err
    assert ("precision tf32 is for GPUs: on most CPUs it has no effect" in out + err) == (precision == "tf32")


def test_idle_workers_are_fine(call: Call, tmp_path: Path) -> None:
    flags = [*SMALL, "--algorithm", "fedlesam", "--rounds", "2", "--threads", "1"]
    code, out, err = call("run", *flags, "--workers", "4", "--out", "several")
    assert code == 0, err
    assert "4 workers" in out + err
    assert "idle" in out + err, "three clients a round: one worker has nothing to do, and the user hears of it"
    assert call("run", *flags, "--out", "one", "-q")[0] == 0
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "several")]
    assert models[0] == models[1]


def test_gpu_memory_without_a_gpu_and_without_the_data(call: Call, tmp_path: Path) -> None:
    """The files of CIFAR-10 are not in an empty folder, and there is no GPU here."""
    data = ["--data", "cifar10", "--data-dir", str(tmp_path / "none")]
    model = [*data, "--model", "resnet18:width=4", "--device", "cuda"]
    flags = ["--clients", "10", "--active", "2", *model]
    code, out, err = call("cost", *flags, "--algorithm", "scaffold", "--memory", "0")
    assert code == 0, err
    rows = dict(line.split(":", 1) for line in out.splitlines())
    assert rows["GPU"].strip().endswith("for each worker with --device cuda, without activations")
    assert "cifar10 was not found" in rows["data"]
    found = {}
    for method in ("fedavg", "fedsam", "scaffold"):
        code, out, err = call("cost", *flags, "--algorithm", method, "--json")
        assert code == 0, err
        found[method] = json.loads(out)
    vector = 4 * found["fedavg"]["parameters"]
    samples = (5_000 + 10_000) * (3 * 32 * 32 * 4 + 8) + (50_000 + 10_000) * (3 * 32 * 32 + 8)
    assert found["fedavg"]["gpu"] == samples + 10 * vector, "5, an update's sum (2), received, held, the server's"
    assert found["fedsam"]["gpu"] == found["fedavg"]["gpu"] + 2 * vector, "v beside v + e, and the ascent"
    assert found["scaffold"]["gpu"] == found["fedavg"]["gpu"] + 6 * vector, "c twice, c_i, c - c_i, its sum"
    assert found["fedavg"]["backward_passes_per_round"] == 2 * 5 * 100


@pytest.mark.parametrize("name", [name for name in NAMES if is_public(name)])
def test_no_public_data_set_needs_its_files(
    name: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words need a model that reads them, and domains a split or a number of clients; the error says so."""
    monkeypatch.setattr(find, "PACKAGED", tmp_path)  # Debian has Fashion-MNIST
    flags = ["--data", name, "--rounds", "2"]
    code, out, err = call("cost", *flags)
    if code != 0:
        assert "--clients N, or the split leave-out:DOMAIN" in err or "which it does not read; use char-gru" in err
        domains = DOMAIN_SETS[name].domains if name in DOMAIN_SETS else ()
        flags += ["--split", f"leave-out:{domains[0]}", "--model", "cnn"] if domains else ["--model", "text-bag"]
        code, out, err = call("cost", *flags)
    assert code == 0, err
    assert f"{name} was not found; assumed: its shape" in out
    if stand_in(name).owners is not None:
        assert call("cost", *flags, "--split", "natural")[0] == 0


def test_stand_ins_have_the_form_of_the_files(tmp_path: Path) -> None:
    """And with all files their summaries' numbers of samples; they are of one stored zero, fewer of them too."""
    write_known(tmp_path / "PACS", "pacs")
    write_roles(tmp_path, {"HAMLET": 30, "OPHELIA": 14})
    for part in ("train", "test"):
        rows = [{"text": word, "label": label} for label, word in enumerate(("bad", "good"))]
        write_lines(tmp_path / "sst2" / f"{part}.jsonl", rows)
    for name in ("pacs:size=16", "shakespeare:stride=5", "sst2:length=7"):
        here, without = load(name, tmp_path), stand_in(name)
        for one, other in ((here.train, without.train), (here.test, without.test)):
            assert (one.x.dtype, one.x.shape[1:], one.y.dtype) == (other.x.dtype, other.x.shape[1:], other.y.dtype)
        assert here.outputs == without.outputs
        assert (here.owners is None, here.domains is None) == (without.owners is None, without.domains is None)
    for name in ("pacs", "officehome", "domainnet", "20newsgroups", "sst2", "trec"):
        data = select(stand_in(name), None, None)
        assert NAMES[name].startswith(f"{len(data.train) + len(data.test):,} ")
        assert select(data, 1000, 100).train.x.untyped_storage().nbytes() <= 4
    listed = stand_in("domainnet:lists=official").domains
    assert listed is not None
    assert listed.test is not None
    assert len(stand_in("pacs:limit=3").train) == 3 * 7 * 4


def test_files_that_are_there_but_damaged_are_an_error(call: Call, tmp_path: Path) -> None:
    """As for a run: they are not the published ones."""
    (tmp_path / "trec").mkdir()
    for part in ("train", "test"):
        (tmp_path / "trec" / f"{part}.jsonl.gz").write_bytes(gzip.compress(b"x"))
    flags = ["--data", "trec", "--data-dir", str(tmp_path), "--split", "iid", "--model", "text-bag", "--clients", "3"]
    code, out, err = call("cost", *flags, "--rounds", "1")
    assert (code, out) == (2, "")
    assert "train.jsonl.gz, line 1: is not JSON" in err


def test_samples_that_go_to_a_gpu_batch_by_batch_do_not_lie_there(call: Call, tmp_path: Path) -> None:
    """Test pictures of a domain are a gigabyte once they are normalised."""
    flags = ["--data", "pacs", "--data-dir", str(tmp_path), "--split", "leave-out:photo", "--model", "resnet18:width=4"]
    code, out, err = call("cost", *flags, "--rounds", "1", "--json")
    assert code == 0, err
    found = json.loads(out)
    pictures = 9_991 * (3 * 224 * 224 + 8)
    assert pictures < found["gpu"] < pictures + 20 * 4 * found["parameters"]
