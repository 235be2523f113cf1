"""Damaged checkpoints: exactly what was saved comes back, or one line says why not and nothing has been touched."""

import dataclasses
import hashlib
import json
import logging
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzing import HOSTILE, Tree, damage, damage_json, damage_tree, fuzz, make_tree, one_line, read_tree, scratch
from torch import Tensor, nn
from worlds import assert_same_bits, federation, samples, snapshot, training

from fedlesam.federation import Federation
from fedlesam.runs.checkpoint import Checkpoints
from fedlesam.runs.journal import Journal

SCHEDULE = ((0, 1), (2, 3), (0, 3), (1, 2))
KEPT = (2, 3, 4)
LAST = KEPT[-1]
MANIFEST = re.compile(r"run/checkpoints/round\d+\.json")


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()


class Scene:
    """A run with three checkpoints, and what the federation was at each of them."""

    def __init__(self, path: Path, algorithm: str, **settings: Any) -> None:
        self.path = path
        self.run = path / "run"
        self.run.mkdir(parents=True)
        (path / "outside.txt").write_text("not ours")
        self.federation = federation(algorithm, clients=samples()[:4], local=training(epochs=1), **settings)
        self.states: dict[int, dict[str, Tensor]] = {}
        self.records: list[dict[str, Any]] = []
        checkpoints = self.checkpoints()
        checkpoints.load(self.federation)
        for active in SCHEDULE:
            record = self.federation.round(active).as_dict()
            checkpoints.journals["metrics.jsonl"].append(record)
            self.records.append(record)
            if self.federation.state.round in KEPT:
                checkpoints.save(self.federation)
                self.states[self.federation.state.round] = snapshot(self.federation)
        checkpoints.journals["metrics.jsonl"].append({"round": LAST, "of": "a round that was lost"})
        checkpoints.journals["metrics.jsonl"].close()
        (checkpoints.folder / "notes.txt").write_text("a user's")
        self.whole = read_tree(path)
        self.lines = self.content("run/metrics.jsonl").splitlines(keepends=True)
        self.files = [name for name, content in self.whole.items() if content != "dir" and name.startswith("run/")]
        self.manifests = sorted(filter(MANIFEST.fullmatch, self.files))
        assert len(self.manifests) == len(KEPT)

    def checkpoints(self) -> Checkpoints:
        journals = {"metrics.jsonl": Journal(self.run / "metrics.jsonl")}
        return Checkpoints(self.run / "checkpoints", len(KEPT), journals, {"split": "a"})

    def content(self, name: str) -> bytes:
        content = self.whole[name]
        assert isinstance(content, bytes)
        return content

    def spoil(self) -> None:
        """So that whatever is right afterwards has been restored."""
        state = self.federation.state
        self.federation.state = dataclasses.replace(state, round=99, weights=torch.full_like(state.weights, torch.nan))
        self.federation.memories.clear()
        if self.federation.memories.folder is not None:
            make_tree(self.federation.memories.folder, {})


@contextmanager
def warnings() -> Iterator[list[str]]:
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


def outside(tree: Tree) -> Tree:
    """What is not the checkpoints' to change."""
    ours = ("run/checkpoints/", "run/metrics.jsonl")
    return {name: content for name, content in tree.items() if not name.startswith(ours)}


def attempt(scene: Scene, tree: Tree, draw: random.Random, forged: bool = False) -> str:
    make_tree(scene.path, tree)
    tree = read_tree(scene.path)
    scene.spoil()
    checkpoints = scene.checkpoints()
    try:
        with warnings() as heard:
            done = checkpoints.load(scene.federation)
    except (ValueError, OSError) as error:
        one_line(error)
        assert str(scene.path) in str(error), f"does not say where: {error!r}"
        assert read_tree(scene.path) == tree, f"refused, but touched ({error})"
        return "refused"
    finally:
        checkpoints.journals["metrics.jsonl"].close()
    after = read_tree(scene.path)
    assert outside(after) == outside(tree)
    if isinstance(tree.get("run/checkpoints/notes.txt"), bytes):
        assert after["run/checkpoints/notes.txt"] == tree["run/checkpoints/notes.txt"]
    for line in heard:
        assert len(line.splitlines()) == 1, line
    if forged:
        try:
            exact = done and same_bits(snapshot(scene.federation), scene.states[done])
        except ValueError as error:
            one_line(error)
            return "refused when used"
        if not exact:
            return "forged and taken"
    check_exact(scene, checkpoints, done, after, forged)
    left = sorted(name for name in tree if MANIFEST.fullmatch(name))
    if done == 0:
        assert not left
        return "no checkpoint left, begun anew"
    if left[-1] == scene.manifests[-1] and done < LAST:
        assert heard, "went back without a word"
    if draw.random() < 0.1:
        again = scene.checkpoints()
        scene.spoil()
        with warnings():
            assert again.load(scene.federation) == done
        again.journals["metrics.jsonl"].close()
        check_exact(scene, again, done, read_tree(scene.path), forged)
    return "exact, the newest" if done == LAST else "exact, one before"


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    try:
        assert_same_bits(one, other)
    except AssertionError:
        return False
    return True


def check_exact(scene: Scene, checkpoints: Checkpoints, done: int, after: Tree, forged: bool = False) -> None:
    if done:
        assert_same_bits(snapshot(scene.federation), scene.states[done])
        assert scene.federation.state.round == done
    if forged:
        return
    assert after["run/metrics.jsonl"] == b"".join(scene.lines[:done])
    if done:
        assert checkpoints.records["metrics.jsonl"] == scene.records[:done]
        assert [manifest.round for manifest in checkpoints.chain][-1] == done
    for name, content in after.items():
        if name in scene.whole and MANIFEST.fullmatch(name) and isinstance(content, bytes):
            assert content == scene.whole[name], "a damaged manifest is left behind"


@pytest.fixture(scope="module")
def scenes() -> Iterator[list[Scene]]:
    with scratch() as path:
        yield [
            Scene(path / "s", "fedlesam-s", model=normed()),
            Scene(path / "smoo", "fedsmoo"),
            Scene(path / "adam", "fedadam"),
            Scene(path / "filed", "fedlesam-d", memory=0, folder=path / "memory"),
        ]


def test_undamaged(scenes: list[Scene]) -> None:
    for scene in scenes:
        assert attempt(scene, scene.whole, random.Random(0)) == "exact, the newest"


def test_damaged_files(scenes: list[Scene]) -> None:
    def damaged(draw: random.Random) -> str:
        scene = draw.choice(scenes)
        return attempt(scene, damage_tree(draw, scene.whole, scene.files), draw)

    found = fuzz("checkpoint files", 600, damaged)
    assert all(found[outcome] for outcome in ("refused", "exact, the newest", "exact, one before"))


def test_damaged_folders(scenes: list[Scene]) -> None:
    """Whole folders and many files at once: lost, exchanged, of other rounds, of other runs."""

    def damaged(draw: random.Random) -> str:
        scene, other = draw.choice(scenes), draw.choice(scenes)
        tree = dict(scene.whole)
        name = draw.choice(scene.files)
        change = draw.randrange(8)
        if change == 0:
            folder = draw.choice(("run/checkpoints", "run/checkpoints/clients"))
            tree = {n: c for n, c in tree.items() if not n.startswith(folder)}
            if draw.random() < 0.5:
                tree[folder] = b"a file"
        elif change == 1:
            tree = {n: c for n, c in tree.items() if n not in draw.sample(scene.files, len(scene.files) // 2)}
        elif change == 2:
            tree = {n: c for n, c in tree.items() if not MANIFEST.fullmatch(n) or draw.random() < 0.4}
        elif change == 3:
            for n in scene.files:
                if n in other.whole and draw.random() < 0.5:
                    tree[n] = other.whole[n]
        elif change == 4:
            tree[f"run/checkpoints/round{draw.randrange(12):06d}.{draw.choice(('json', 'safetensors'))}"] = tree[name]
        elif change == 5:
            new = draw.choice(
                ("round.json", "roundabout.json", "round-00001.json", "round1000000.json", "round 7.json")
            )
            tree[f"run/checkpoints/{new}"] = draw.choice((b"", b"x", tree[scene.manifests[0]], "dir"))
        elif change == 6:
            for n in scene.files:
                content = tree[n]
                if draw.random() < 0.3 and isinstance(content, bytes):
                    tree[n] = content[: draw.randrange(len(content) + 1)]
        else:
            for n in draw.sample(scene.manifests, draw.randrange(1, len(KEPT) + 1)):
                tree[n] = draw.choice((b"", "dir", damage(draw, scene.content(n))))
        return attempt(scene, tree, draw)

    fuzz("checkpoint folders", 250, damaged)


def test_json_of_manifests(scenes: list[Scene]) -> None:
    """Valid JSON that says something else; its checksum is the old one, or one of a part."""

    def damaged(draw: random.Random) -> str:
        scene = draw.choice(scenes)
        name = draw.choice(scene.manifests)
        changed = damage_json(draw, json.loads(scene.content(name)))
        indent = draw.choice((None, None, None, 1))
        text = json.dumps(changed, sort_keys=draw.random() < 0.9, indent=indent)
        return attempt(scene, {**scene.whole, name: text.encode()}, draw)

    fuzz("manifests, JSON", 250, damaged)


def forge(body: Any) -> bytes:
    """A manifest with the right checksum, whatever it says."""
    text = json.dumps(body, sort_keys=True)
    return json.dumps(
        {"sha256": hashlib.sha256(text.encode()).hexdigest(), "checkpoint": body}, sort_keys=True
    ).encode()


def test_forged_manifests(scenes: list[Scene]) -> None:
    """With the right checksum nothing can be known to be wrong; still there is only one line, and no other file."""

    def damaged(draw: random.Random) -> str:
        scene = draw.choice(scenes)
        name = draw.choice((scene.manifests[-1], *scene.manifests))
        body = json.loads(scene.content(name))["checkpoint"]
        for _ in range(draw.choice((1, 1, 2))):
            body = damage_json(draw, body)
        if draw.random() < 0.2 and isinstance(body, dict) and isinstance(body.get("memories"), dict):
            content = scene.content("outside.txt") if "outside.txt" in scene.whole else b""
            seal = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            body["memories"][draw.choice(("../../../outside.txt", str(scene.path / "outside.txt")))] = seal
        tree = {**scene.whole, name: forge(body)}
        return attempt(scene, tree, draw, forged=True)

    fuzz("manifests, forged", 300, damaged)


def test_forged_contents(scenes: list[Scene]) -> None:
    """Damaged tensors and journals under manifests that were made to fit them."""

    def damaged(draw: random.Random) -> str:
        scene = draw.choice(scenes)
        tree = dict(scene.whole)
        victims = [n for n in scene.files if not MANIFEST.fullmatch(n) and "notes" not in n]
        name = draw.choice(victims)
        content = damage_tensors(draw, scene.content(name)) if name.endswith("safetensors") else None
        if content is None or draw.random() < 0.3:
            content = damage(draw, scene.content(name), [scene.content(n) for n in victims])
        tree[name] = content
        seal = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for manifest in scene.manifests:
            body = json.loads(scene.content(manifest))["checkpoint"]
            file = name.rpartition("/")[2]
            if file in body["memories"]:
                body["memories"][file] = seal
            if file == f"round{body['round']:06d}.safetensors":
                body["state"] = seal
            if file in body["journals"]:
                size = draw.choice((len(content), body["journals"][file]["size"], draw.randrange(len(content) + 1)))
                digest = hashlib.sha256(content[:size]).hexdigest()
                body["journals"][file] = {"size": min(size, len(content)), "sha256": digest}
            tree[manifest] = forge(body)
        return attempt(scene, tree, draw, forged=True)

    fuzz("contents, forged", 300, damaged)


def damage_tensors(draw: random.Random, content: bytes) -> bytes:
    """A safetensors file whose header says something else, with the length to match."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    about = header.get("__metadata__")
    if about and draw.random() < 0.5:
        key = draw.choice(list(about))
        about[key] = draw.choice(("5", "[5]", "[[]]", '{"a": 1}', '["x"]', '["x.y"]', "[" * 5000, "null", '"abc"'))
    else:
        header = damage_json(draw, header)
    if draw.random() < 0.2 and isinstance(header, dict):
        entries = [entry for entry in header.values() if isinstance(entry, dict) and "dtype" in entry]
        if entries:
            dtypes = ("F64", "I64", "BF16", "F16", "BOOL", "F8_E4M3", "F8_E8M0", "F4", "C64", "U64", "x", *HOSTILE)
            draw.choice(entries)["dtype"] = draw.choice(dtypes)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def test_the_newest_is_the_one_with_the_most_rounds(tmp_path: Path) -> None:
    """Also beyond six digits."""
    checkpoints = Checkpoints(tmp_path)
    for round in (1_000_000, 999_999, 2):
        checkpoints._manifest(round).write_text("")
    assert [path.stem for path in checkpoints.found()] == ["round1000000", "round999999", "round000002"]


def test_what_an_interrupted_first_commit_left_is_not_used(tmp_path: Path) -> None:
    """A power loss may leave a segment empty, which the next commit must not take for written."""
    checkpoints, fed = Checkpoints(tmp_path), first_rounds()
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "round000002-segment0.safetensors").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("a user's")
    assert checkpoints.load(fed) == 0
    fed.round((0, 1))
    fed.round((2, 3))
    checkpoints.save(fed)
    other = first_rounds()
    assert Checkpoints(tmp_path).load(other) == 2
    assert_same_bits(snapshot(other), snapshot(fed))
    assert (tmp_path / "notes.txt").read_text() == "a user's"


def test_a_folder_in_the_place_of_a_manifest_does_not_stop_a_run(tmp_path: Path) -> None:
    checkpoints, fed = Checkpoints(tmp_path, keep=1), first_rounds()
    (tmp_path / "round000009.json").mkdir()
    for _ in range(2):
        fed.round((0, 1))
        checkpoints.save(fed)
    again = Checkpoints(tmp_path, keep=1)
    with warnings() as heard:
        assert again.load(first_rounds()) == 2
    assert len(heard) == 1
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["round000002.json", "round000009.json"]


def test_a_manifest_under_another_name_is_not_believed(tmp_path: Path) -> None:
    """An old checkpoint copied over the newest would take the run back without a word."""
    checkpoints, fed = Checkpoints(tmp_path), first_rounds()
    for _ in range(2):
        fed.round((0, 1))
        checkpoints.save(fed)
    (tmp_path / "round000002.json").write_bytes((tmp_path / "round000001.json").read_bytes())
    with warnings() as heard:
        assert Checkpoints(tmp_path).load(first_rounds()) == 1
    assert "round000002.json: is damaged: it belongs to another round" in heard[0]


def first_rounds() -> Federation:
    return federation("fedlesam", clients=samples()[:4], local=training(epochs=1))
