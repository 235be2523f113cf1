"""The outside anchor: its network, its settings, and all of it at the smallest scale."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlesam.data.dataset import Images, Shard
from reproduction import anchor
from reproduction.anchor import Trial

Call = Callable[..., int | str | None]


def test_the_network_is_lenet_5() -> None:
    model = anchor.lenet5((3, 32, 32), 10)
    assert [tuple(p.shape) for p in model.parameters() if p.ndim > 1] == [
        (6, 3, 5, 5),
        (16, 6, 5, 5),
        (120, 400),
        (84, 120),
        (10, 84),
    ]
    assert anchor.lenet5((1, 28, 28), 10)(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_the_settings_are_the_baselines() -> None:
    whole = anchor.load("cifar10", None, smoke=True)
    large = [
        Images(part.x.repeat_interleave(4, 2).repeat_interleave(4, 3), part.y) for part in (whole.train, whole.test)
    ]
    whole = dataclasses.replace(whole, train=large[0], test=large[1])
    federation = anchor.make_federation(Trial("cifar10", "Dirichlet .5", 1), whole)
    local = federation.local
    assert (local.lr, local.lr_decay, local.momentum, local.weight_decay) == (0.01, 1.0, 0.9, 1e-5)
    assert (local.epochs, local.batch_size, local.clip, local.augment) == (10, 64, None, anchor.flip_and_cut)
    assert (federation.name, len(federation.clients), federation.weighting) == ("fedavg", 10, "examples")
    used = sum(len(client) for client in federation.clients if isinstance(client, Shard))
    assert len(whole.train) * 0.9 <= used <= len(whole.train) * 0.9 + 10, "a tenth of every client's images"
    pixels = whole.normalise(whole.train.x)
    assert float(pixels.min()) == 0.0 and float(pixels.max()) == 1.0


@given(st.integers(0, 10_000), st.sampled_from(["iid", "Dirichlet .5"]))
def test_every_image_has_one_client(seed: int, split: str) -> None:
    labels = np.random.default_rng(seed).integers(0, 10, 2_000)
    parts = anchor.divide(labels, split, 10, np.random.default_rng(seed))
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(2_000))
    assert min(map(len, parts)) >= 10
    if split == "iid":
        assert {len(part) for part in parts} == {200}


def test_dirichlet_parts_have_different_classes() -> None:
    labels = np.arange(10_000) % 10
    parts = anchor.divide(labels, "Dirichlet .5", 10, np.random.default_rng(0))
    counts = np.array([np.bincount(labels[part], minlength=10) for part in parts])
    assert (counts / counts.sum(1, keepdims=True)).max(1).mean() > 0.25


def test_images_are_cut_out_of_their_reflection_and_mirrored() -> None:
    image = torch.arange(64.0).view(1, 1, 8, 8)
    bordered = torch.from_numpy(np.pad(image[0, 0].numpy(), 4, mode="reflect"))
    cuts = {
        (row, column, mirrored): cut.flip(1) if mirrored else cut
        for row in range(9)
        for column in range(9)
        for mirrored in (False, True)
        for cut in (bordered[row : row + 8, column : column + 8],)
    }
    made = anchor.flip_and_cut(image.expand(4_000, -1, -1, -1), torch.Generator().manual_seed(0))
    seen = {key for key, cut in cuts.items() if bool((made[:, 0] == cut).all((1, 2)).any())}
    assert seen == set(cuts)
    assert bool(torch.stack([(made[:, 0] == cut).all(2).all(1) for cut in cuts.values()]).any(0).all())


def test_all_of_it_at_the_smallest_scale(call: Call, tmp_path: Path) -> None:
    asked = ("anchor-niid", "--scale", "smoke", "--seeds", "1", "--out", str(tmp_path), "-q")
    assert not call(*asked)
    text = (tmp_path / "anchor-niid.md").read_text()
    assert "cifar10, iid (1 seed)" in text and "71.32" in text and "not run" not in text
    lines = (tmp_path / "runs.jsonl").read_text()
    assert not call(*asked) and (tmp_path / "runs.jsonl").read_text() == lines, "a second call trains nothing"
    again = tmp_path / "again"
    assert not call(
        "anchor-niid",
        "--scale",
        "smoke",
        "--seeds",
        "1",
        "--lines",
        str(tmp_path / "runs.jsonl"),
        "--out",
        str(again),
        "-q",
    )
    assert (again / "anchor-niid.md").read_text() == text


def test_the_committed_table_follows_from_the_committed_lines() -> None:
    from reproduction.writing import markdown

    committed = Path(__file__).parents[2] / "docs" / "results" / "anchor"
    table = anchor.make_table(committed / "runs.jsonl", anchor.SEEDS)
    assert (committed / "anchor-niid.md").read_text("utf-8") == markdown(table)
