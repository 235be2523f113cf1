"""A run that is interrupted and goes on has the same bits as one that is not."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Case, References, digits, flags, result, small
from instrument import Plan
from processes import fedlesam

from fedlesam.algorithms import CATALOGUE, CONTROLS, PAPER
from fedlesam.federation import Federation, Record
from fedlesam.runs import compare as comparison
from fedlesam.runs.build import build
from fedlesam.runs.checkpoint import Checkpoints, Manifest
from fedlesam.runs.config import RunConfig
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.overview import size_of
from fedlesam.runs.runner import execute


def stop_after(rounds: int) -> Callable[[Record], None]:
    def watch(record: Record) -> None:
        if record.round + 1 == rounds:
            raise KeyboardInterrupt

    return watch


def interrupt(config: RunConfig, path: Path, after: int = 3) -> None:
    with pytest.raises(KeyboardInterrupt):
        execute(config, path, watch=stop_after(after), data=digits())
    summary = RunFolder(path).read_summary()
    assert (summary["state"], summary["rounds"]) == ("interrupted", after)


def go_on(config: RunConfig, path: Path) -> list[int]:
    """Finish a run; the rounds that it trained."""
    seen: list[int] = []
    execute(config, path, watch=lambda record: seen.append(record.round), data=digits())
    return seen


@pytest.mark.parametrize("method", [name for name, make in CATALOGUE.items() if make in PAPER + CONTROLS])
def test_every_method(method: str, references: References, tmp_path: Path) -> None:
    config = small(method)
    interrupt(config, tmp_path / "run")
    assert go_on(config, tmp_path / "run") == [3, 4, 5]
    assert result(tmp_path / "run") == references(config)


@pytest.mark.parametrize(
    ("method", "before", "after"),
    [
        ("fedlesam-s", {"workers": 1}, {"workers": 2}),
        ("fedlesam-s", {"workers": 2}, {"workers": 1, "memory": 3_000}),
        ("fedlesam-s", {"workers": 2, "store": "pinned"}, {"workers": 3, "store": "pinned"}),
        ("fedsmoo", {"workers": 2}, {"workers": 3}),
        ("fedsmoo", {"workers": 2, "store": "pinned", "memory": 0}, {"workers": 1}),
        ("fedsmoo", {"memory": 3_000}, {"workers": 2, "store": "pinned", "memory": 3_000}),
        ("fedadam", {"workers": 2, "store": "pinned"}, {"workers": 2}),
        ("feddyn", {"workers": 2}, {"workers": 2, "store": "pinned"}),
    ],
)
def test_other_workers(
    method: str, before: dict[str, Any], after: dict[str, Any], references: References, tmp_path: Path
) -> None:
    interrupt(small(method, **before), tmp_path / "run")
    assert go_on(small(method, **after), tmp_path / "run") == [3, 4, 5]
    assert result(tmp_path / "run") == references(small(method))


@pytest.mark.parametrize(
    "change",
    [
        {"dropout": 0.4},
        {"model": "faulty:Normed"},
        {"model": "faulty:Normed", "workers": 2},
        {"engine": "stacked"},
        {"evaluate_every": 2},
        {"per_client": True, "evaluate_every": 2},
        {"epochs": "1-3", "momentum": 0.9},
        {"max_update_norm": 0.4},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["fedlesam-s", "fedsmoo"])
def test_other_settings(method: str, change: dict[str, Any], references: References, tmp_path: Path) -> None:
    config = small(method, **change)
    interrupt(config, tmp_path / "run")
    assert go_on(config, tmp_path / "run") == [3, 4, 5]
    assert result(tmp_path / "run") == references(config)
    if "dropout" in change or "max_update_norm" in change:
        assert references(config).summary["dropped"] > 0, "it is about something"


def test_at_every_round_and_at_the_last(references: References, tmp_path: Path) -> None:
    config = small("fedlesam-s")
    for after in range(1, 7):
        interrupt(config, tmp_path / "run", after)
    assert go_on(config, tmp_path / "run") == []
    assert result(tmp_path / "run") == references(config)


def test_without_a_checkpoint_it_begins_again(references: References, tmp_path: Path) -> None:
    config = small("fedlesam-s", checkpoint_every="1h")
    case = Case(tmp_path, config)
    assert case.attempt(Plan("half pwrite", 4)).killed
    assert not (case.run / "checkpoints").exists()
    assert case.attempt().code == 0
    assert (case.loaded, result(case.run)) == (0, references(config))


@pytest.mark.parametrize("method", ["fedlesam-s", "fedsmoo", "fedadam"])
@pytest.mark.parametrize("workers", [1, 2])
def test_without_a_run_folder(method: str, workers: int, tmp_path: Path) -> None:
    """As a Python user does it, with all memory in RAM, and a second checkpoint after going on."""
    config, checkpoints = small(method, workers=workers), tmp_path / "checkpoints"
    with build(config, digits()).federation as whole:
        for _ in range(6):
            whole.round()
    for start, end in ((0, 2), (2, 4), (4, 6)):
        with build(config, digits()).federation as part:
            kept = Checkpoints(checkpoints, keep=1)
            assert kept.load(part) == start
            while part.state.round < end:
                part.round()
            kept.save(part)
            assert {path.name for path in kept.clients.glob("*")} == set(kept.chain[-1].memories)
    assert torch.equal(part.weights, whole.weights)


# Damage


def newest(path: Path) -> tuple[Path, Manifest]:
    manifest = Checkpoints(path / "checkpoints").found()[0]
    return manifest, Manifest.read(manifest)


def spoil(path: Path, tensor: str | None = None) -> None:
    """A bit in the middle of a file, or of a tensor in it."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    if tensor is not None:
        size = int.from_bytes(content[:8], "little")
        middle = 8 + size + sum(json.loads(content[8 : 8 + size])[tensor]["data_offsets"]) // 2
    content[middle] ^= 1
    path.write_bytes(content)


def damage(run: Path, what: str) -> None:
    """Something that only the newest checkpoint has."""
    path, manifest = newest(run)
    part = 1 if any("segment1" in name for name in manifest.memories) else 0
    memory = path.parent / "clients" / f"round{manifest.round:06d}-segment{part}.safetensors"
    targets = {
        "manifest": path,
        "state": path.with_suffix(".safetensors"),
        "memory": memory,
        "anchor": memory,
    }
    if what == "metrics":
        lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        (run / "metrics.jsonl").write_bytes(b"".join(lines[: manifest.round - 1]) + lines[manifest.round - 1][:20])
    elif what.startswith("no "):
        targets[what.removeprefix("no ")].unlink()
    else:
        spoil(targets[what], f"anchor/{manifest.round - 1}" if what == "anchor" else None)


@pytest.mark.parametrize(
    ("what", "workers"),
    [(what, {}) for what in ("manifest", "state", "memory", "anchor", "metrics", "no state", "no memory")]
    + [(what, {"workers": 2}) for what in ("state", "memory")]
    + [(what, {"workers": 2, "store": "pinned"}) for what in ("state", "memory", "anchor")],
    ids=str,
)
def test_a_damaged_checkpoint_is_stepped_over(
    what: str,
    workers: dict[str, Any],
    references: References,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = small("fedlesam-s", **workers)
    interrupt(config, tmp_path / "run", 4)
    damage(tmp_path / "run", what)
    with caplog.at_level(logging.WARNING, "fedlesam"):
        assert go_on(config, tmp_path / "run") == [3, 4, 5]
    assert "using the previous checkpoint" in caplog.text
    assert result(tmp_path / "run") == references(config)


def contents(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and file.name != "run.lock"
    }


@pytest.mark.parametrize("what", ["manifests", "states"])
def test_all_damaged_is_refused_and_nothing_touched(what: str, references: References, tmp_path: Path) -> None:
    config = small("fedlesam-s")
    interrupt(config, tmp_path / "run", 4)
    good = tmp_path / "good"
    shutil.copytree(tmp_path / "run", good)
    for path in (tmp_path / "run" / "checkpoints").glob("*.json" if what == "manifests" else "*.safetensors"):
        spoil(path)
    before = contents(tmp_path / "run")
    with pytest.raises(ValueError, match=r"none of its 2 checkpoints can be used.*--overwrite"):
        go_on(config, tmp_path / "run")
    assert contents(tmp_path / "run") == before
    shutil.rmtree(tmp_path / "run")
    good.rename(tmp_path / "run")
    assert go_on(config, tmp_path / "run") == [4, 5]
    assert result(tmp_path / "run") == references(config)


def test_overwrite_begins_again(references: References, tmp_path: Path) -> None:
    config = small("fedlesam-s")
    interrupt(small("fedsmoo"), tmp_path / "run", 4)
    execute(config, tmp_path / "run", overwrite=True, data=digits())
    assert result(tmp_path / "run") == references(config)


# Disk use


@pytest.mark.parametrize("change", [{}, {"memory": 3_000}, {"workers": 2}, {"workers": 2, "store": "pinned"}], ids=str)
@pytest.mark.parametrize("keep", [1, 3])
def test_only_what_kept_checkpoints_name_is_kept(
    keep: int, change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each of many commits; so the disk use is bounded."""
    real, sizes = Checkpoints.save, []

    def save(self: Checkpoints, federation: Federation, *more: Any) -> None:
        real(self, federation, *more)
        manifests = [Manifest.read(path) for path in self.found()]
        done = federation.state.round
        assert [manifest.round for manifest in manifests] == list(range(done, max(0, done - keep), -1))
        named = {name for manifest in manifests for name in manifest.memories}
        assert {path.name for path in self.clients.iterdir()} == named
        assert {path.name for path in self.folder.iterdir() if path.is_file()} == {
            f"round{manifest.round:06d}.{kind}" for manifest in manifests for kind in ("json", "safetensors")
        }
        sizes.append(size_of(self.folder))

    monkeypatch.setattr(Checkpoints, "save", save)
    execute(small("fedlesam-s", rounds=16, keep=keep, **change), tmp_path / "run", data=digits())
    assert len(sizes) == 15
    assert max(sizes[10:]) <= 1.5 * max(sizes[5:10])
    assert not (tmp_path / "run" / "checkpoints").exists()


# The command


def test_repeating_the_command(references: References, tmp_path: Path) -> None:
    config = small("fedlesam-s", model="faulty:Net")
    command = ["run", *flags(config), "--out", "run"]
    code, _, err = fedlesam(tmp_path, *command, FAULT="SIGTERM 30").wait()
    assert code == 143, err
    done = len(RunFolder(tmp_path / "run").read_metrics())
    code, out, err = fedlesam(tmp_path, *command).wait()
    assert code == 0, err
    assert f"resuming after round {done} of 6" in err
    assert result(tmp_path / "run") == references(config)
    before = contents(tmp_path / "run")
    code, out, err = fedlesam(tmp_path, *command).wait()
    assert (code, out.count("this run is already finished")) == (0, 1)
    assert contents(tmp_path / "run") == before


def test_another_configuration_is_refused_with_the_difference(tmp_path: Path) -> None:
    config = small("fedlesam-s", model="faulty:Net")
    assert fedlesam(tmp_path, "run", *flags(config), "--out", "run", FAULT="SIGINT 30").wait()[0] == 130
    before = contents(tmp_path / "run")
    other = ["run", *flags(small("fedlesam-s", model="faulty:Net", lr=0.2)), "--out", "run"]
    code, _, err = fedlesam(tmp_path, *other).wait()
    assert code == 2
    assert "lr: you gave 0.2, the folder has 0.1" in err
    assert "Traceback" not in err
    assert contents(tmp_path / "run") == before


def test_a_comparison_goes_on(references: References, tmp_path: Path) -> None:
    plans = comparison.plan(small("fedavg"), ["fedavg", "fedlesam-s", "fedsmoo"], 1)
    rounds: list[tuple[str, int]] = []

    def watch(stop: bool) -> Callable[[str, RunConfig], Callable[[Record], None]]:
        def begin(name: str, config: RunConfig) -> Callable[[Record], None]:
            def see(record: Record) -> None:
                rounds.append((config.algorithm, record.round))
                if stop and config.algorithm == "fedlesam-s" and record.round == 2:
                    raise KeyboardInterrupt

            return see

        return begin

    with pytest.raises(KeyboardInterrupt):
        comparison.compare(plans, tmp_path, watch=watch(stop=True))
    assert rounds[-1] == ("fedlesam-s", 2)
    rounds.clear()
    comparison.compare(plans, tmp_path, watch=watch(stop=False))
    assert rounds == [("fedlesam-s", r) for r in (3, 4, 5)] + [("fedsmoo", r) for r in range(6)]
    for name, plan in plans.items():
        assert result(tmp_path / name) == references(plan)


def test_a_comparison_killed_in_its_second_run(references: References, tmp_path: Path) -> None:
    config = small("fedlesam-s", model="faulty:Net")
    common = flags(config)[2:]
    command = ["compare", "fedavg", "fedlesam-s", *common, "--out", "all", "-q"]
    code, _, err = fedlesam(tmp_path, *command, FAULT="SIGINT 110").wait()
    assert code == 130, err
    states = [RunFolder(path.parent).read_summary()["state"] for path in sorted(tmp_path.rglob("summary.json"))]
    assert states == ["finished", "interrupted"]
    code, _, err = fedlesam(tmp_path, *command).wait()
    assert code == 0, err
    assert result(tmp_path / "all" / "fedlesam-s-seed0") == references(config)
    assert json.loads((tmp_path / "all" / "fedavg-seed0" / "summary.json").read_text())["state"] == "finished"
