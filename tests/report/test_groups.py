"""What may be compared, how it is named, and what is noted."""

import json
from pathlib import Path

import numpy as np
import pytest
from fake_runs import fake_run
from safetensors.numpy import save_file

from fedlesam.algorithms import CATALOGUE
from fedlesam.report.groups import compare_runs
from fedlesam.report.style import FAMILY, looks
from fedlesam.runs.read import Run, find_runs


def runs(*folders: Path) -> list[Run]:
    return find_runs(folders)


def test_seeds_of_one_method_are_one_group(tmp_path: Path) -> None:
    folders = [
        fake_run(tmp_path / f"{name}{seed}", name, seed=seed, workers=1 + seed, data_dir=f"d{seed}")
        for name in ("fedavg", "fedsam")
        for seed in (0, 1)
    ]
    found = compare_runs(runs(*folders))
    assert [(g.label, g.seeds) for g in found.groups] == [("fedavg", [0, 1]), ("fedsam", [0, 1])]
    assert found.varied == ["algorithm"]
    assert found.baseline is found.groups[0]


def test_a_method_with_other_settings_is_another_line_that_says_so(tmp_path: Path) -> None:
    found = compare_runs(
        runs(
            fake_run(tmp_path / "a", "fedavg", hyper={"lr_g": 1.0}),
            fake_run(tmp_path / "b", "fedlesam", hyper={"rho": 0.01}),
            fake_run(tmp_path / "c", "fedlesam", hyper={"rho": 0.01}, seed=1),
            fake_run(tmp_path / "d", "fedlesam", hyper={"rho": 0.5}),
            fake_run(tmp_path / "e", "fedavg", hyper={"lr_g": 1.0}, split="pooled", clients=None),
        )
    )
    assert [group.label for group in found.groups] == [
        "fedavg",
        "fedlesam",
        "fedlesam rho=0.5",
        "centralised SGD",
    ]
    assert len({group.look for group in found.groups}) == 4
    assert found.groups[1].look == ("#D55E00", "--"), "the method's own"
    assert found.baseline is found.groups[0], "the one most like the others"
    assert found.groups[3].look == ("#7F7F7F", "-"), "grey: no competitor"
    assert not any("differ in more than the method" in note for note in found.notes), "it cannot be otherwise"
    assert any("a round of it is one epoch over all data (centralised SGD)" in note for note in found.notes)
    assert any("Not every method has the same seeds" in note for note in found.notes)


def test_all_clients_are_not_shown_as_one(tmp_path: Path) -> None:
    found = compare_runs(runs(fake_run(tmp_path / "a", active=1), fake_run(tmp_path / "b", active=1.0)))
    assert [group.label for group in found.groups] == ["fedavg active=1", "fedavg active=1.0"]
    assert any("active: 1 (fedavg active=1); 1.0 (fedavg active=1.0)" in note for note in found.notes)


@pytest.mark.parametrize(("name", "ours", "theirs"), [("data", "digits", "cifar10"), ("model", "mlp", "cnn")])
def test_runs_of_other_data_or_models_are_refused(tmp_path: Path, name: str, ours: str, theirs: str) -> None:
    a, b = (fake_run(tmp_path / value, **{name: value}) for value in (ours, theirs))  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=f"cannot be compared, {name} is {ours} in {a}, {theirs} in {b}: make a report"
    ):
        compare_runs(runs(a, b))


def test_no_runs() -> None:
    with pytest.raises(ValueError, match="there are no runs"):
        compare_runs([])


def test_the_same_run_twice_is_no_spread(tmp_path: Path) -> None:
    """The longer of the two stays."""
    short, long = fake_run(tmp_path / "a", finished=False), fake_run(tmp_path / "b")
    (short / "metrics.jsonl").write_text("".join((short / "metrics.jsonl").read_text().splitlines(True)[:3]))
    found = compare_runs(runs(short, long))
    assert [run.path for run in found.runs] == [long]
    assert found.notes == [f"{short} is dropped: {long} has the same settings and seed."]


def test_what_makes_a_comparison_doubtful_is_noted(tmp_path: Path) -> None:
    a = fake_run(tmp_path / "a", "fedavg", rounds=12, probes=True)
    b = fake_run(tmp_path / "b", "fedsam", rounds=6, finished=False, threads=2)
    versions = {"fedlesam": "0.2.0", "machine": "aarch64, 4 cores", "commit": "ffff"}
    (b / "versions.json").write_text(json.dumps(versions))
    probe = {"round": 6, "probe": "sharpness", "values": {"first_order": 1.0}, "about": {"radius": 0.1}}
    (b / "probes.jsonl").write_text(json.dumps(probe) + "\n")
    notes = " ".join(compare_runs(runs(a, b)).notes)
    for said in (
        f"{b} is not finished, 6 of 6 rounds",
        "rounds: 12 (fedavg); 6 (fedsam rounds=6)",
        "different machines",
        "different versions of fedlesam: 0.1.0, 0.2.0",
        "threads or device differ",
        "The probe sharpness was not made in the same way everywhere",
        "radius 0.1 (fedsam rounds=6)",
    ):
        assert said in notes, said
    assert compare_runs(runs(a)).notes == []


def test_other_clients_under_the_same_split_and_seed_are_noted(tmp_path: Path) -> None:
    a, b = fake_run(tmp_path / "a", "fedavg"), fake_run(tmp_path / "b", "fedsam")
    summary = json.loads((b / "summary.json").read_text())
    (b / "summary.json").write_text(json.dumps({**summary, "split": {"hash": "another"}}))
    assert any("have different clients" in note for note in compare_runs(runs(a, b)).notes)


def test_every_line_of_a_sweep_has_its_own_look() -> None:
    found = looks(["fedavg", *["fedlesam"] * 12, "scaffold"])
    assert len(set(found)) == 14
    assert found[0] == looks(["fedavg"])[0]
    assert len(looks(["fedavg"] * 60)) == 60, "and when looks run out"
    known = [name for name in CATALOGUE if name in FAMILY]
    everybody = looks([*known, "mine:a", "mine:b", "mine:c"])
    assert len(set(everybody)) == len(known) + 3
    assert everybody[: len(known)] == looks(known), "those with a look of their own keep it"


def test_surfaces_along_other_directions_are_noted(tmp_path: Path) -> None:
    a, b = fake_run(tmp_path / "a", "fedavg", probes=True), fake_run(tmp_path / "b", "fedsam", probes=True)
    assert compare_runs(runs(a, b)).notes == []
    axis = np.linspace(-1, 1, 3)
    header = {"metadata": json.dumps({"seed": 1, "directions_seed": 1, "samples": 1000, "weights": "abc"})}
    save_file(
        {"x": axis, "y": axis, "loss": np.ones((3, 3)), "accuracy": np.ones((3, 3))},
        b / "surface-2d.safetensors",
        header,
    )
    [note] = compare_runs(runs(a, b)).notes
    assert "surface-2d was not made in the same way everywhere" in note
    assert "seed 1, samples 1000 (fedsam)" in note
