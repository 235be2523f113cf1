"""Frozen features: computed once, resumed, read as a data set whose views training swaps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fedlesam as fl
from fedlesam.cli.data_command import command
from fedlesam.data import features
from fedlesam.data.features import Request, compute


class Tiny(nn.Module):
    """Mean colours of the left and of the right half: a mirror image has them the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.fc = nn.Linear(6, 2)
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        half = x.shape[3] // 2
        out: Tensor = self.fc(self.scale * torch.cat([x[..., :half].mean((2, 3)), x[..., half:].mean((2, 3))], 1))
        return out


@pytest.fixture
def trunk(monkeypatch: pytest.MonkeyPatch) -> Tiny:
    model = Tiny()
    monkeypatch.setitem(features.TRUNKS, "tiny", features.Trunk("fc", 0.5, 0.5))
    monkeypatch.setattr(features, "make_model", lambda *_, **__: model)
    monkeypatch.setattr(features, "BLOCK", 8)
    return model


@pytest.fixture
def pictures(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    for part, count in (("train", 10), ("test", 3)):
        for name in ("cat", "dog"):
            folder = tmp_path / "pictures" / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    return f"folder:{tmp_path / 'pictures'}"


def test_mirrored_features_are_the_second_view(trunk: Tiny, pictures: str, tmp_path: Path) -> None:
    path = compute(Request(pictures, "tiny", 16, mirror=True), tmp_path / "f.safetensors")
    data = fl.data.load(f"features:{path}")
    assert data.shape == (1, 2, 6) and len(data.train) == 20 and len(data.test) == 6
    assert data.classes == ("cat", "dog") and data.train.y.tolist() == [0] * 10 + [1] * 10
    stored = load_file(path)
    raw = data.train.x[:, 0] * stored["scale"] + stored["center"]
    assert torch.allclose(raw[:, 1], raw[:, 0].roll(3, dims=1), atol=2e-2)  # half precision in the cache


def test_one_scale_for_all_features(trunk: Tiny, pictures: str, tmp_path: Path) -> None:
    data = fl.data.load(f"features:{compute(Request(pictures, 'tiny', 16, pca=3), tmp_path / 'f.safetensors')}")
    x = data.train.x[:, 0, 0]
    assert torch.allclose(x.mean(0), torch.zeros(3), atol=1e-5)
    spread = x.std(0)
    assert spread[0] > spread[1] > spread[2] and spread.square().mean().item() == pytest.approx(1, rel=1e-4)
    assert torch.allclose((x.T @ x).fill_diagonal_(0), torch.zeros(3, 3), atol=1e-2)


def test_a_second_call_computes_nothing_and_an_interrupted_one_only_the_rest(
    trunk: Tiny, pictures: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = features._forward, []

    def interrupted(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return forward(*args)

    request = Request(pictures, "tiny", 16)
    monkeypatch.setattr(features, "_forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compute(request, tmp_path / "f.safetensors")
    assert trunk.seen == 16 and not (tmp_path / "f.safetensors").exists()
    first = compute(request, tmp_path / "f.safetensors")
    assert trunk.seen == 26
    second = compute(request, tmp_path / "g.safetensors")
    assert trunk.seen == 26 and second.read_bytes() == first.read_bytes()
    with torch.no_grad():
        trunk.scale.mul_(2)
    compute(request, tmp_path / "h.safetensors")
    assert trunk.seen == 52, "other weights, other features"


def test_a_damaged_block_is_computed_again(trunk: Tiny, pictures: str, tmp_path: Path) -> None:
    first = compute(Request(pictures, "tiny", 16), tmp_path / "f.safetensors").read_bytes()
    for block in (features.entry_folder("features", "x").parent).rglob("*.safetensors"):
        block.write_bytes(b"no")
    assert compute(Request(pictures, "tiny", 16), tmp_path / "f.safetensors").read_bytes() == first


def test_domains_stay(trunk: Tiny, tmp_path: Path) -> None:
    for domain in ("art", "photo"):
        for name in ("cat", "dog"):
            folder = tmp_path / "d" / domain / name
            folder.mkdir(parents=True)
            for i in range(3):
                Image.new("RGB", (20, 20), (i * 50, 9, 9)).save(folder / f"{i}.png")
    path = compute(Request(f"domains:{tmp_path / 'd'},size=16", "tiny", 16, mirror=True), tmp_path / "f.safetensors")
    data = fl.data.load(f"features:{path}")
    assert data.domains is not None and data.domains.names == ("art", "photo") and len(data.test) == 0
    assert data.domains.of.tolist() == [0] * 6 + [1] * 6


def test_training_takes_either_view_and_evaluation_the_first(trunk: Tiny, pictures: str, tmp_path: Path) -> None:
    data = fl.data.load(f"features:{compute(Request(pictures, 'tiny', 16, mirror=True), tmp_path / 'f.safetensors')}")
    assert data.augment is not None
    x = data.train.x
    drawn = data.augment(x, torch.Generator().manual_seed(0))
    swapped = [not torch.equal(a, b) for a, b in zip(drawn, x, strict=True)]
    assert 0 < sum(swapped) < len(x)
    assert all(torch.equal(a, b.flip(1) if s else b) for a, b, s in zip(drawn, x, swapped, strict=True))
    head = fl.models.head(data.shape, 2, hidden=4)
    assert torch.equal(head(x), head(x[:, :, :1]))
    plain, stacked = (
        fl.Federation(
            head,
            [data.shard(torch.arange(0, 10)), data.shard(torch.arange(10, 20))],
            "fedlesam-s",
            fl.LocalTraining(batch_size=5, epochs=2, augment=data.augment),
            test=data.test_shard(),
            execution=fl.Execution(threads=1, engine=engine),
        )
        for engine in ("plain", "stacked")
    )
    for federation in (plain, stacked):
        list(federation.run(3))
    assert torch.allclose(plain.weights, stacked.weights, atol=1e-5)


def test_a_linear_head() -> None:
    assert [tuple(p.shape) for p in fl.models.head((1, 2, 6), 3, hidden=0).parameters()] == [(3, 6), (3,)]


def test_the_command_and_what_it_refuses(
    trunk: Tiny, pictures: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "f.safetensors"
    said = CliRunner().invoke(command, ["features", pictures, "--trunk", "tiny", "--size", "16", "--out", str(out)])
    assert said.exit_code == 0 and said.output.strip().endswith(f"--data features:{out}")
    assert fl.data.check(f"features:{out}").form == "frozen features"
    with pytest.raises(ValueError, match="--pca 7: there are 6 features"):
        compute(Request(pictures, "tiny", 16, pca=7), out)
    with monkeypatch.context() as patch:
        patch.setattr(features.os, "access", lambda *_: False)
        with pytest.raises(ValueError, match="give another place with --out"):
            compute(Request(pictures, "tiny", 16), out)
    with pytest.raises(ValueError, match="trunk"):
        compute(Request(pictures, "efficientnet-lite9"), out)
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="is not a file of `fedlesam data features`"):
        fl.data.load(f"features:{tmp_path / 'other.safetensors'}")
    with pytest.raises(ValueError, match="cannot be read"):
        fl.data.load(f"features:{tmp_path / 'none.safetensors'}")
