"""Damaged run folders, as `run`, `runs` and reports see them."""

import fcntl
import json
import logging
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fuzzing import HOSTILE, Tree, damage_json, damage_tree, fuzz, make_tree, one_line, read_tree, scratch
from test_fuzz_configs import DATA, SMALL

from fedlesam.cli.runs_command import command as runs_command
from fedlesam.federation import Record
from fedlesam.report.ranking import ranking
from fedlesam.runs import config as configs
from fedlesam.runs import folder
from fedlesam.runs.config import RunConfig
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.overview import find_runs, read_overview
from fedlesam.runs.read import read_run
from fedlesam.runs.runner import execute

CONFIG = configs.resolve(RunConfig(**{**SMALL, "algorithm": "fedlesam-s", "keep_last": False}))
VICTIMS = ("config.toml", "summary.json", "metrics.jsonl", "versions.json", "split.safetensors", "run.lock")
VERSIONS = {"fedlesam": "1", "torch": "2"}
STATES = ("finished", "interrupted", "stopped", "killed", "killed early")


@contextmanager
def silent() -> Iterator[list[str]]:
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("fedlesam")
    propagates, log.propagate = log.propagate, False
    log.addHandler(handler)
    try:
        yield heard
    finally:
        log.removeHandler(handler)
        log.propagate = propagates


class Scene:
    """One run in five states."""

    def __init__(self, path: Path) -> None:
        self.path = path / "x"
        with silent():
            execute(CONFIG, self.path, data=DATA)
        self.trees: dict[str, Tree] = {"finished": read_tree(self.path)}
        self.reference = self.trees["finished"]
        make_tree(self.path, {})

        def interrupt(record: Record) -> None:
            if record.round == 1:
                raise KeyboardInterrupt

        with silent(), pytest.raises(KeyboardInterrupt):
            execute(CONFIG, self.path, data=DATA, watch=interrupt)
        there = self.trees["interrupted"] = read_tree(self.path)
        stopped = {**json.loads(text_of(there, "summary.json")), "state": "stopped", "why": "a [red]/b [/x]"}
        self.trees["stopped"] = {**there, "summary.json": json.dumps(stopped).encode()}
        metrics = text_of(there, "metrics.jsonl")
        killed = {n: c for n, c in there.items() if n not in ("summary.json", "model.safetensors")}
        self.trees["killed"] = {**killed, "metrics.jsonl": metrics + b'{"round": 2, "act'}
        self.trees["killed early"] = {n: c for n, c in killed.items() if not n.startswith("checkpoints")}


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with pytest.MonkeyPatch.context() as patch, scratch() as path:
        patch.setattr(folder, "versions", lambda: VERSIONS)
        patch.setattr(os, "fsync", lambda handle: None)
        yield Scene(path)


def text_of(tree: Tree, name: str) -> bytes:
    content = tree[name]
    assert isinstance(content, bytes)
    return content


def untimed(metrics: bytes | str) -> list[dict[str, Any]]:
    assert isinstance(metrics, bytes)
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in metrics.splitlines()]


def but_lock(tree: Tree) -> Tree:
    """The lock's content is only a courtesy."""
    return {name: content for name, content in tree.items() if name != "run.lock"}


def attempt(scene: Scene, state: str, tree: Tree) -> str:
    make_tree(scene.path, tree)
    tree = read_tree(scene.path)
    seen = read_as_a_report(scene.path)
    assert read_tree(scene.path) == tree, "looking changed something"
    try:
        with silent() as heard:
            execute(CONFIG, scene.path, data=DATA)
    except (ValueError, OSError) as error:
        one_line(error)
        assert str(scene.path) in str(error), f"does not say where: {error!r}"
        assert but_lock(read_tree(scene.path)) == but_lock(tree), f"refused, but touched ({error})"
        return f"refused{seen}"
    after = read_tree(scene.path)
    assert after.keys() <= tree.keys() | scene.reference.keys(), "wrote something else"
    summary = tree.get("summary.json")
    if isinstance(summary, bytes) and json.loads(summary).get("state") == "finished":
        assert {n: c for n, c in after.items() if not n.startswith("checkpoints")} == {
            n: c for n, c in tree.items() if not n.startswith("checkpoints")
        }
        return f"finished, only read{seen}"
    reference = scene.reference
    for name in ("model.safetensors", "split.safetensors"):
        assert after[name] == reference[name], name
    assert untimed(after["metrics.jsonl"]) == untimed(reference["metrics.jsonl"])
    assert not any(name.startswith("checkpoints") for name in after)
    split = tree.get("split.safetensors")
    damaged = isinstance(split, bytes) and split != reference["split.safetensors"]
    assert heard or not damaged, "a damaged split was passed over"
    metrics = tree.get("metrics.jsonl", b"")
    begun_anew = state in ("finished", "killed early") and isinstance(metrics, bytes) and b"\n" in metrics
    assert heard or not begun_anew, "began again without a word"
    assert RunFolder(scene.path).read_config() == CONFIG or tree["config.toml"] != reference["config.toml"]
    return f"gone on with, exact{seen}"


def read_as_a_report(path: Path) -> str:
    """What only reads: never anything but a ValueError; the list of runs shows a damaged one as such."""
    overview = read_overview(RunFolder(path))
    assert overview.state in ("finished", "interrupted", "stopped", "running", "damaged"), overview
    try:
        run = read_run(path)
        ranking([run])
        run.curve("test_accuracy"), run.curve("train_loss")
        run.class_counts()
        assert isinstance(run.versions, dict)
    except ValueError as error:
        one_line(error)
        assert str(path) in str(error), f"does not say where: {error!r}"
        return ", not reported"
    assert overview.state != "damaged", overview
    return ""


def test_undamaged(scene: Scene) -> None:
    for state in STATES:
        assert attempt(scene, state, scene.trees[state]) in ("finished, only read", "gone on with, exact")


def test_damaged_run_folders(scene: Scene) -> None:
    def damaged(draw: random.Random) -> str:
        state = draw.choice(STATES)
        whole = scene.trees[state]
        tree = damage_tree(draw, whole, [name for name in VICTIMS if name in whole])
        return attempt(scene, state, tree)

    found = fuzz("run folders", 100, damaged)
    for outcome in ("refused", "finished, only read", "gone on with, exact"):
        assert any(name.startswith(outcome) for name in found)


def test_damaged_json_of_run_folders(scene: Scene) -> None:
    """Valid JSON that says something else, as the list of runs and a report see it."""

    def damaged(draw: random.Random) -> str:
        whole = scene.trees[draw.choice(("finished", "interrupted", "stopped"))]
        name = draw.choice(("summary.json", "metrics.jsonl", "versions.json"))
        content = text_of(whole, name)
        if name == "metrics.jsonl":
            lines: list[Any] = [json.loads(line) for line in content.splitlines()]
            number = draw.randrange(len(lines))
            lines[number] = damage_json(draw, lines[number])
            new = "".join(json.dumps(line) + "\n" for line in lines)
        else:
            new = json.dumps(damage_json(draw, json.loads(content)))
        make_tree(scene.path, {**whole, name: new.encode()})
        show_table(draw, scene.path)
        return f"read{read_as_a_report(scene.path)}"

    fuzz("run folders, JSON", 250, damaged)


def show_table(draw: random.Random, path: Path) -> None:
    if draw.random() < 0.2:
        shown = CliRunner().invoke(runs_command, [str(path.parent), *draw.choice(([], ["--json"]))])
        assert shown.exception is None, shown.exception


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 0, 1, 2), (0, 2)])
def test_rounds_in_another_order_are_refused(scene: Scene, order: tuple[int, ...]) -> None:
    lines = text_of(scene.trees["finished"], "metrics.jsonl").splitlines(keepends=True)
    make_tree(scene.path, {**scene.trees["finished"], "metrics.jsonl": b"".join(lines[i] for i in order)})
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line \d: is not a record of a round: it is not of round \d"):
        read_run(scene.path)


@pytest.mark.parametrize("name", ["model.safetensors", "summary.json", "versions.json"])
def test_a_folder_in_the_place_of_a_result_is_refused_before_training(scene: Scene, name: str) -> None:
    tree = {**scene.trees["killed"], name: "dir"}
    make_tree(scene.path, tree)
    with pytest.raises(ValueError, match=f"{name}: is a folder, but a file of the run goes there"):
        execute(CONFIG, scene.path, data=DATA)
    assert but_lock(read_tree(scene.path)) == but_lock(tree)


def test_damaged_lock_of_a_running_run(scene: Scene) -> None:
    make_tree(scene.path, scene.trees["interrupted"])

    def damaged(draw: random.Random) -> str:
        about = {"pid": 5, "host": "here", "since": 1e9, "round": 0}
        changed = json.dumps(damage_json(draw, about)).encode()
        changed = draw.choice(
            (changed, b"", b"[" * 4096, draw.randbytes(50), json.dumps(draw.choice(HOSTILE)).encode())
        )
        path = scene.path / "run.lock"
        path.write_bytes(changed)
        with path.open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            [run] = find_runs(scene.path)
            assert run.state == "running"
            show_table(draw, scene.path)
        return "shown without the time left" if run.seconds_left is None else "shown"

    fuzz("run.lock, held", 150, damaged)
