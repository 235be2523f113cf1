"""Checkpoints of clients' memories: one file for what changed, of which never more than half is dead."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from worlds import assert_same_bits, federation, play, samples, snapshot, training

from fedlesam.core.disk import Damaged, FileDigest, digest_of
from fedlesam.core.messages import Memory
from fedlesam.core.state import save
from fedlesam.engines import segments
from fedlesam.engines.base import Saved
from fedlesam.engines.segments import Segment, segment_file
from fedlesam.engines.store import Store, anchor_file, client_file
from fedlesam.federation import Federation
from fedlesam.runs.checkpoint import Checkpoints, Manifest

SIZE = 500
UNIT = SIZE * 4


def commit(store: Store, round: int, clients: range | list[int], *, shares: bool = False) -> None:
    anchor = torch.full((SIZE,), -float(round))
    new: dict[int, Memory | None] = {}
    for client in clients:
        memory = Memory({"old": anchor} if shares else {}, {"c": torch.full((SIZE,), 1000.0 * round + client)})
        new[client] = store.prepare(round, client, memory, anchor)
    store.make_room(round, anchor, new)
    store.commit(round, anchor, new)


def stored(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("round*"))


def values(store: Store) -> dict[int, tuple[float, float]]:
    """Client -> (its own number, the shared one)."""
    nothing = torch.zeros(1)
    return {
        client: (memory.correction["c"][0].item(), memory.perturbation.get("old", nothing)[0].item())
        for client, memory in store.items()
    }


def test_a_save_writes_one_file_with_what_changed(tmp_path: Path) -> None:
    store = Store()
    commit(store, 0, range(200))
    first = store.save(tmp_path, segment_file(1, 0), {})
    assert list(first) == ["round000001-segment0.safetensors"]
    assert first == {name: digest_of(tmp_path / name) for name in first}
    assert 200 * UNIT < stored(tmp_path) < 200 * UNIT * 1.02
    commit(store, 1, [3, 7])
    second = store.save(tmp_path, segment_file(2, 0), first)
    assert list(second) == [*first, "round000002-segment0.safetensors"]
    assert second["round000002-segment0.safetensors"].size < 2 * UNIT + 1000
    assert store.save(tmp_path, segment_file(3, 0), second) == second, "nothing changed, nothing is written"
    other = Store()
    other.load(tmp_path, second)
    assert values(other) == values(store)


def test_another_store_goes_on_from_the_files_alone(tmp_path: Path) -> None:
    """As after a crash: what the checkpoint has is found in the files."""
    store = Store()
    commit(store, 0, range(50))
    known = store.save(tmp_path, segment_file(1, 0), {})
    other = Store()
    other.load(tmp_path, known)
    commit(other, 1, [5])
    files = other.save(tmp_path, segment_file(2, 0), known)
    assert files["round000002-segment0.safetensors"].size < UNIT + 1000


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("budget", [None, 0, 7 * UNIT])
def test_dead_space_is_never_above_live_space(budget: int | None, shares: bool, tmp_path: Path) -> None:
    store = Store(None if budget is None else tmp_path / "memory", budget)
    known: dict[str, FileDigest] = {}
    draw = torch.Generator().manual_seed(0)
    written = 0
    for round in range(60):
        active = torch.randperm(40, generator=draw)[: 40 if round == 0 else 4].tolist()
        commit(store, round, active, shares=shares)
        before = set(known)
        known = store.save(tmp_path / "saved", segment_file(round + 1, 0), known)
        written += sum(digest.size for name, digest in known.items() if name not in before)
        for path in (tmp_path / "saved").iterdir():
            if path.name not in known:
                path.unlink()
        live = 40 * UNIT + shares * UNIT * len(set(store.rounds.values()))
        assert stored(tmp_path / "saved") <= 2 * live + 1000 * len(known)
    assert written < 3 * (40 + 60 * 4) * (1 + shares) * UNIT, "moving what is live costs no more than writing it"
    other = Store(tmp_path / "other", 0)
    other.load(tmp_path / "saved", known)
    assert values(other) == values(store)


def test_a_segment_goes_as_soon_as_more_than_half_of_it_is_dead(tmp_path: Path) -> None:
    """Three of other sizes: they stay with half of their clients, and go with one less."""
    store, known, size = Store(), dict[str, FileDigest](), {0: 20, 1: 21, 2: 7}

    def saved(round: int, clients: list[int]) -> set[int]:
        """The rounds after which the segments were written, in each of which no more than half is dead."""
        nonlocal known
        commit(store, round, clients)
        known = store.save(tmp_path, segment_file(round, 0), known)
        total = 0
        for name in known:
            held = Segment(tmp_path / name).rounds
            assert len(held) <= 2 * sum(store.rounds[client] == own for client, own in held.items())
            total += len(held)
        assert total <= 2 * len(store.rounds)
        return {int(name[len("round") : len("round") + 6]) for name in known}

    for group in size:
        saved(group, [100 * group + client for client in range(size[group])])
    assert saved(3, [100 * group + client for group in size for client in range(size[group] // 2)]) == {0, 1, 2, 3}
    assert saved(4, [size[0] // 2]) == {1, 2, 3, 4}
    assert saved(5, [100 + size[1] // 2]) == {2, 3, 4, 5}
    assert saved(6, [200 + size[2] // 2]) == {3, 4, 5, 6}
    other = Store()
    other.load(tmp_path, known)
    assert values(other) == values(store)


def test_there_are_never_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MOST", 8)
    store, known = Store(), {}
    for round in range(40):
        commit(store, round, [round])
        known = store.save(tmp_path, segment_file(round + 1, 0), known)
        assert len(known) <= 8
    other = Store()
    other.load(tmp_path, known)
    assert values(other) == values(store)


def test_the_received_model_is_stored_once(tmp_path: Path) -> None:
    for number, budget in enumerate((None, 0)):
        store = Store(None if budget is None else tmp_path / "memory", budget)
        commit(store, 0, range(30), shares=True)
        commit(store, 1, range(10), shares=True)
        [name] = store.save(tmp_path / str(number), segment_file(2, 0), {})
        with safe_open(tmp_path / str(number) / name, framework="pt") as file:
            anchors = [key for key in file.keys() if key.startswith("anchor/")]  # noqa: SIM118
        assert sorted(anchors) == ["anchor/0", "anchor/1"]
        assert stored(tmp_path / str(number)) < (30 + 2) * UNIT + 2000
        other = Store()
        other.load(tmp_path / str(number), [name])
        one, two = other[1].perturbation["old"], other[12].perturbation["old"]
        assert (one[0], two[0]) == (-1, 0)
        assert other[3].perturbation["old"].data_ptr() == one.data_ptr()
        assert other.anchor(1) is not None
        assert other.anchor(7) is None


def test_states_of_all_forms(tmp_path: Path) -> None:
    """Empty ones, other names, shapes and types, vectors that overlap, a scalar."""
    rows = torch.arange(12.0).view(2, 6)
    memories = {
        0: Memory(),
        1: Memory({}, {"c": torch.ones(3, dtype=torch.bfloat16)}),
        2: Memory({"a": rows[1], "b": rows[1]}, {"column": rows[:, 0]}),
        3: Memory({}, {"c": torch.tensor(5.0)}),
        4: Memory({}, {"c": torch.ones(3, dtype=torch.float64), "n": torch.tensor([1], dtype=torch.int8)}),
        5: Memory({}, {"c": torch.zeros(0)}),
        6: Memory(),
    }
    store = Store()
    store.commit(4, torch.zeros(3), memories)
    files = store.save(tmp_path, segment_file(5, 0), {})
    other = Store(tmp_path / "own", 0)
    other.load(tmp_path, files)
    assert other.rounds == dict.fromkeys(memories, 4)
    assert sorted(other.remembering()) == store.remembering() == [1, 2, 3, 4, 5]
    for client, memory in memories.items():
        assert_same_bits(memory.flatten(), other[client].flatten())


def test_what_was_loaded_leaves_the_store_with_its_last_client(tmp_path: Path) -> None:
    store = Store()
    commit(store, 0, range(3))
    files = store.save(tmp_path, segment_file(1, 0), {})
    own = Store(tmp_path / "own", 0)
    own.load(tmp_path, files)
    link = tmp_path / "own" / "round000001-segment0.safetensors"
    commit(own, 1, [0, 1])
    assert link.exists()
    again: Store = pickle.loads(pickle.dumps(own))
    assert values(again) == values(own) == {0: (1000, 0), 1: (1001, 0), 2: (2, 0)}
    commit(own, 2, [2])
    assert not link.exists()


def test_a_file_that_is_no_segment(tmp_path: Path) -> None:
    numbers = torch.tensor([1, 2])
    right: dict[str, Tensor] = {"0/clients": numbers, "0/rounds": numbers, "0/correction/c": torch.zeros(2, 4)}
    save(tmp_path / "x", right, shared=[[]])
    assert Segment(tmp_path / "x").rounds == {1: 1, 2: 2}
    wrong: list[tuple[dict[str, Any], Any]] = [
        ({}, None),
        ({}, [[], []]),
        ({}, [["perturbation/old"]]),
        ({}, [[5]]),
        ({"0/clients": torch.tensor([1, 1])}, [[]]),
        ({"0/clients": torch.tensor([1, -1])}, [[]]),
        ({"0/rounds": torch.tensor([1.0, 2.0])}, [[]]),
        ({"0/rounds": torch.tensor([1])}, [[]]),
        ({"0/correction/c": torch.zeros(3, 4)}, [[]]),
        ({"0/other/c": torch.zeros(2, 4)}, [[]]),
        ({"anchor/x": torch.zeros(2)}, [[]]),
    ]
    for change, shared in wrong:
        save(tmp_path / "x", {**right, **change}, **({} if shared is None else {"shared": shared}))
        with pytest.raises(Damaged, match=r"x: is damaged: "):
            Segment(tmp_path / "x")


# The manifest, and checkpoints of earlier versions


def test_the_manifest_does_not_grow_with_the_clients(tmp_path: Path) -> None:
    sizes = []
    for count in (4, 400):
        fed = federation("fedavg", clients=samples([4] * 4) * (count // 4), local=training(epochs=1))
        fed.memories.commit(0, fed.weights, {c: Memory({}, {"c": torch.ones(2)}) for c in range(count)})
        checkpoints = Checkpoints(tmp_path / str(count))
        fed.round([0, 1])
        checkpoints.save(fed)
        sizes.append(checkpoints.found()[0].stat().st_size)
    assert abs(sizes[0] - sizes[1]) < 20


def in_the_old_layout(checkpoints: Checkpoints, fed: Federation) -> None:
    """Replace the newest checkpoint by what an earlier version would have written: a file for each client."""
    path = checkpoints.found()[0]
    manifest = Manifest.read(path)
    shutil.rmtree(checkpoints.clients)
    memories = {}
    for client, round in fed.memories.rounds.items():
        tensors = fed.memories[client].flatten()
        anchor = tensors.pop("perturbation/old")
        for name, content, about in (
            (anchor_file(round), {"anchor": anchor}, {}),
            (client_file(round, client), tensors, {"anchor": ["perturbation/old"]}),
        ):
            save(checkpoints.clients / name, content, **about)
            memories[name] = digest_of(checkpoints.clients / name)
    rounds = dict(fed.memories.rounds)
    old = Manifest(manifest.run, manifest.round, manifest.state, manifest.journals, memories, rounds)
    path.write_text(old.dump())
    assert json.loads(path.read_text())["checkpoint"]["format"] == 1


SETUPS: list[dict[str, Any]] = [{}, {"memory": 0}, {"workers": 2}, {"workers": 2, "store": "pinned"}]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_the_old_layout_is_read_and_replaced(setup: dict[str, Any], tmp_path: Path) -> None:
    first = play(federation("fedlesam-s"), [(0, 3), (1, 2)])
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(first)
    in_the_old_layout(checkpoints, first)
    with federation("fedlesam-s", **setup) as fed:
        resumed = Checkpoints(tmp_path, keep=1)
        assert resumed.load(fed) == 2
        play(fed, [(0, 1)])
        play(first, [(0, 1)])
        resumed.save(fed)
        assert torch.equal(fed.weights, first.weights)
    names = {path.name for path in checkpoints.clients.iterdir()}
    assert names
    assert all(segments.NAME.fullmatch(name) for name in names)
    again = federation("fedlesam-s")
    assert Checkpoints(tmp_path).load(again) == 3
    assert_same_bits(snapshot(again), snapshot(first))


@pytest.mark.parametrize("setup", SETUPS[1:], ids=str)
def test_workers_save_and_load_segments(setup: dict[str, Any], tmp_path: Path) -> None:
    """Every process that has clients of its own writes one; any number of them reads what any number wrote."""
    plain = play(federation("fedlesam-s"), [(0, 3), (1, 2), (0, 1)])
    with federation("fedlesam-s", **setup) as fed:
        play(fed, [(0, 3), (1, 2)])
        saved = fed.save_memories(tmp_path)
        parts = 2 if setup.get("store") == "pinned" else 1
        assert sorted(saved.digests) == [segment_file(2, part) for part in range(parts)]
        state = fed.state
    for other in (setup, {"workers": 3, "store": "pinned"}, {}):
        with federation("fedlesam-s", **other) as fed:
            fed.restore(state, tmp_path, saved)
            play(fed, [(0, 1)])
            assert torch.equal(fed.weights, plain.weights)


def test_a_segment_on_no_machine_is_named(tmp_path: Path) -> None:
    with federation("scaffold", workers=2, store="pinned") as fed:
        play(fed, [(0, 3), (1, 2)])
        saved = fed.save_memories(tmp_path)
        (tmp_path / segment_file(2, 1)).unlink()
        with pytest.raises(Damaged, match=r"round000002-segment1\.safetensors: is damaged, or no machine"):
            fed.restore(fed.state, tmp_path, Saved(saved.digests))
