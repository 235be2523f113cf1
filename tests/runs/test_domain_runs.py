"""Runs that leave a domain out: what is trained on, what is tested on, and the same bits however it is run."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from domain_files import write_domains
from safetensors.torch import load_model

from fedlesam.cli import main
from fedlesam.data.dataset import DataSet, Shard
from fedlesam.models.catalogue import make_model
from fedlesam.runs.build import build, load_data
from fedlesam.runs.config import RunConfig, resolve
from fedlesam.runs.runner import execute


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setenv("FEDLESAM_CACHE", str(tmp_path / "cache"))
    root = write_domains(tmp_path / "data", ("ink", "oil", "photo", "wax"), ("cat", "dog", "elk"), 10)
    return RunConfig(
        algorithm="fedlesam-s", data=f"domains:{root},size=12", split="leave-out:oil,3", active=0.34, rounds=3,
        model="cnn:width=4", epochs=1, batch_size=8, lr=0.05, threads=1,
    )  # fmt: skip


def test_the_test_is_the_domain_left_out(config: RunConfig, tmp_path: Path) -> None:
    summary = execute(resolve(config), tmp_path / "run")
    data = load_data(config)
    model = make_model(config.model, data.shape, 3, 0)
    load_model(model, str(tmp_path / "run" / "model.safetensors"))
    assert data.domains is not None
    x, y = data.shard(torch.from_numpy((data.domains.of == 1).nonzero()[0])).tensors()
    assert len(x) == 30
    with torch.no_grad():
        right = (model.eval()(x).argmax(1) == y).double().mean()
    assert summary["accuracy"]["last"] == pytest.approx(float(right))
    assert summary["split"]["scheme"] == "leave-out:oil,3"
    assert summary["split"]["dropped"] == 0


def test_the_papers_two_settings(config: RunConfig) -> None:
    """Each domain one client, all active; each domain ten clients, 20 % active."""
    for split, active, wanted in (("leave-out:oil", 1.0, (3, 3)), ("leave-out:oil,10", 0.2, (30, 6))):
        federation = build(resolve(dataclasses.replace(config, split=split, active=active))).federation
        assert (len(federation.clients), federation.active) == wanted


def test_defaults_are_the_papers() -> None:
    for data in ("pacs", "officehome:limit=5", "domainnet", "domains:somewhere"):
        settled = resolve(RunConfig(data=data, split="leave-out:x"))
        assert (settled.clients, settled.epochs, settled.batch_size) == (None, 5, 32)


@pytest.mark.parametrize("change", [{"workers": 2}, {}])
def test_streaming_and_workers_do_not_change_the_bits(
    config: RunConfig, change: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(resolve(config), tmp_path / "one")
    monkeypatch.setattr("fedlesam.data.dataset.STREAMED", 0)
    execute(resolve(dataclasses.replace(config, **change)), tmp_path / "two")  # type: ignore[arg-type]
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


def test_batch_norm_statistics_are_averaged_and_used(config: RunConfig, tmp_path: Path) -> None:
    config = dataclasses.replace(
        config, model="resnet18:width=4,norm=batch", split="leave-out:oil", active=1.0, rounds=1
    )
    execute(resolve(config), tmp_path / "run")
    model = make_model(config.model, (3, 12, 12), 3, 0)
    before = model.get_buffer("bn1.running_mean").clone()
    load_model(model, str(tmp_path / "run" / "model.safetensors"))
    assert not torch.equal(model.get_buffer("bn1.running_mean"), before)


def fedlesam(*args: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["fedlesam", *args])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_the_command_line(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "wax" / "elk" / "004.png").write_bytes(b"spoilt")
    what = ["--data", config.data, "--split", "leave-out:wax"]
    assert fedlesam("split", *what, monkeypatch=monkeypatch) == 0
    said = capsys.readouterr()
    assert "samples left out for the test:        29" in said.out
    assert "skipped: wax/elk/004.png: does not decode" in said.err.replace("\n", " ")
    assert "1 of 120 images is skipped" in said.err
    run = ["run", *what, "--model", "cnn:width=4", "--active", "100%", "--rounds", "1", "--epochs", "1", "--out", "r"]
    assert fedlesam(*run, monkeypatch=monkeypatch) == 0
    assert "accuracy, last round" in capsys.readouterr().out
    assert fedlesam("run", "--data", config.data, "--split", "leave-out:wex", monkeypatch=monkeypatch) != 0
    assert "did you mean 'wax'" in capsys.readouterr().err
    for what_, names in (
        ("data", ("pacs", "officehome", "domainnet", "domains:PATH", "size=96,limit=100")),
        ("splits", ("leave-out:DOMAIN[,M]",)),
        ("models", ("efficientnet-lite0", "vit-b32", "weights")),
    ):
        assert fedlesam("list", what_, monkeypatch=monkeypatch) == 0
        shown = capsys.readouterr().out
        assert all(name in shown for name in names)


def test_fewer_samples_keep_their_domains(config: RunConfig) -> None:
    whole, some = load_data(config), load_data(dataclasses.replace(config, samples=60))
    assert whole.domains is not None and some.domains is not None and len(some.domains.of) == 60

    def shades(data: DataSet) -> dict[bytes, int]:
        assert data.domains is not None
        return {x.numpy().tobytes(): int(of) for x, of in zip(data.train.x, data.domains.of, strict=True)}

    assert shades(some).items() <= shades(whole).items()


def test_what_is_held_out_is_not_of_the_domain_left_out(config: RunConfig) -> None:
    """A search never sees the domain that the winner is tested on."""
    made = build(resolve(dataclasses.replace(config, held_out=0.3)))
    domains, shard = made.data.domains, made.federation.test_data
    assert domains is not None and domains.held is not None and isinstance(shard, Shard)
    assert shard.images is made.data.test, "no image that a client or the test has"
    seen = domains.held[shard.indices.numpy()]
    assert len(seen) and (seen != 1).all() and (domains.held == 1).any()
    assert (domains.of[np.concatenate(made.split.clients)] != 1).all()
