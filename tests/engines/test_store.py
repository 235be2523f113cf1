"""What clients remember: in RAM up to a budget, beyond it in files that never change."""

import errno
import gc
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor, nn
from worlds import SCHEDULE, assert_same_bits, federate, federation, play, snapshot, states

from fedlesam import LocalTraining
from fedlesam.core.messages import Memory
from fedlesam.engines.store import Store

SIZE = 6
UNIT = SIZE * 4


def vector(value: float) -> Tensor:
    return torch.full((SIZE,), float(value))


def keep(store: Store, round: int, clients: dict[int, float], *, own: bool = True) -> Tensor:
    """A round of clients that keep the received model and, with `own`, a vector of their own."""
    anchor = vector(1000 + round)
    new: dict[int, Memory | None] = {}
    for client, value in clients.items():
        memory = Memory({"last": anchor}, {"c": vector(value)} if own else {})
        new[client] = store.prepare(round, client, memory, anchor)
    store.make_room(round, anchor, new)
    store.commit(round, anchor, new)
    return anchor


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def test_it_is_a_mapping_of_those_ever_active(tmp_path: Path) -> None:
    for number, budget in enumerate((None, 0, UNIT * 2)):
        store = Store(tmp_path / str(number), budget)
        assert len(store) == 0
        assert list(store) == []
        assert store.get(3) is None
        keep(store, 0, {7: 7, 2: 2})
        assert list(store) == [2, 7]
        assert len(store) == 2
        assert 7 in store
        assert 3 not in store
        assert store[7].correction["c"].tolist() == [7.0] * SIZE
        assert store.get(3, "nothing") == "nothing"
        assert {client: memory.correction["c"][0].item() for client, memory in store.items()} == {2: 2.0, 7: 7.0}
        with pytest.raises(KeyError):
            store[3]


def test_a_budget_needs_a_folder() -> None:
    with pytest.raises(ValueError, match="needs a folder"):
        Store(None, 5)


def test_memory_only_for_clients_that_were_active() -> None:
    fed = federation("fedlesam-s", active=2)
    fed.round([1, 4])
    fed.round([4])
    unit = fed.weights.nbytes
    assert list(fed.memories) == [1, 4]
    assert fed.memories.nbytes == 4 * unit, "two control variates, and the models of two rounds"
    fed.round([1, 4])
    assert fed.memories.nbytes == 3 * unit, "two control variates, and the one model both received"
    (one,), (other,) = (fed.memories[client].perturbation.values() for client in (1, 4))
    assert one is other


def test_the_received_model_is_one_file_for_all_its_clients(tmp_path: Path) -> None:
    store = Store(tmp_path, 0)
    keep(store, 0, dict.fromkeys(range(5), 1.0), own=False)
    assert files(tmp_path) == {"round000000-anchor.safetensors"} | {
        f"round000000-client{client:06d}.safetensors" for client in range(5)
    }
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes["round000000-anchor.safetensors"] >= UNIT
    empty = [size for name, size in sizes.items() if "client" in name]
    with_vector = Store(tmp_path / "own", 0)
    keep(with_vector, 0, {0: 1.0})
    one = (tmp_path / "own" / "round000000-client000000.safetensors").stat().st_size
    assert max(empty) + UNIT <= one, "a client's own file does not repeat the shared vector"
    first, second = store[0], store[1]
    assert first.perturbation["last"].data_ptr() == second.perturbation["last"].data_ptr()


def test_files_are_written_once_and_collected_when_nobody_names_them(tmp_path: Path) -> None:
    store = Store(tmp_path, 0)
    keep(store, 0, {0: 1, 1: 2, 2: 3})
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    keep(store, 1, {1: 5})
    kept = ["round000000-anchor", "round000000-client000000", "round000000-client000002"]
    new = ["round000001-anchor", "round000001-client000001"]
    assert files(tmp_path) == {f"{name}.safetensors" for name in kept + new}
    for name in kept:
        about = (tmp_path / f"{name}.safetensors").stat()
        assert (about.st_ino, about.st_mtime_ns) == before[f"{name}.safetensors"]
    keep(store, 2, {0: 6})
    assert "round000000-anchor.safetensors" in files(tmp_path), "client 2 still keeps it"
    keep(store, 3, {2: 7})
    assert not [name for name in files(tmp_path) if name.startswith("round000000")]
    assert [store[c].correction["c"][0].item() for c in range(3)] == [6, 5, 7]
    assert [store[c].perturbation["last"][0].item() for c in range(3)] == [1002, 1001, 1003]
    assert set(store._clients) == {1, 2, 3}, "no trace of rounds that nobody keeps"


def test_the_second_client_does_not_write_the_model_again(tmp_path: Path) -> None:
    store, anchor, seen = Store(tmp_path, 0), vector(1), set()
    for client in range(3):
        store.prepare(0, client, Memory({"last": anchor}), anchor)
        seen.add((tmp_path / "round000000-anchor.safetensors").stat().st_ino)
        (tmp_path / f"keeps inode {client} from being used again").touch()
    assert len(seen) == 1


def test_the_longest_inactive_goes_to_files_first(tmp_path: Path) -> None:
    store = Store(tmp_path, 4 * UNIT)
    keep(store, 0, {0: 1})
    keep(store, 1, {1: 2})
    assert store.nbytes == 4 * UNIT
    assert files(tmp_path) == set()
    keep(store, 2, {0: 3})
    keep(store, 3, {2: 4})
    assert list(store._resident) == [0, 2], "client 1 was inactive the longest"
    assert files(tmp_path) == {"round000001-anchor.safetensors", "round000001-client000001.safetensors"}
    assert store[1].correction["c"][0] == 2
    assert store[1].perturbation["last"][0] == 1001
    assert files(tmp_path) == {"round000001-anchor.safetensors", "round000001-client000001.safetensors"}


def test_a_budget_smaller_than_one_memory_still_works(tmp_path: Path) -> None:
    store = Store(tmp_path, UNIT)
    for round in range(4):
        keep(store, round, {round % 2: round, 2: -round})
        assert store.nbytes <= UNIT
    assert [store[c].correction["c"][0].item() for c in range(3)] == [2, 3, -3]


def test_reading_maps_the_file(tmp_path: Path) -> None:
    """A hundred megabytes come in as pages of the file, not as memory of this process."""
    store, anchor = Store(tmp_path, 0), torch.zeros(25_000_000)
    store.commit(0, anchor, {0: store.prepare(0, 0, Memory({"last": anchor}, {"c": anchor + 1}), anchor)})
    del anchor
    gc.collect()
    before = anonymous()
    memory = store[0]
    assert float(memory.correction["c"].sum()) == 25_000_000
    assert float(memory.perturbation["last"].sum()) == 0
    assert anonymous() - before < 50_000_000
    for name, tensor in (("client000000", memory.correction["c"]), ("anchor", memory.perturbation["last"])):
        assert mapping_of(tensor.data_ptr()).endswith(f"round000000-{name}.safetensors")


def anonymous() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


def mapping_of(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(end, 16) for end in line.split()[0].split("-"))
        if low <= address < high:
            return line
    return ""


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def scribble(path: Path) -> None:
    path.write_bytes(b"\xff" * 100)


def replace(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"nothing.of.ours": torch.ones(3)}, path)


@pytest.mark.parametrize("damage", [truncate, scribble, replace, Path.unlink])
@pytest.mark.parametrize("which", ["client000003", "anchor"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: Any, which: str) -> None:
    store = Store(tmp_path, 0)
    keep(store, 0, {3: 1})
    path = tmp_path / f"round000000-{which}.safetensors"
    damage(path)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}: the memory of client 3 cannot be read"):
        store[3]


def test_vectors_a_rule_keeps_twice(tmp_path: Path) -> None:
    store, twice, rows = Store(tmp_path, 0), vector(1), torch.arange(12.0).view(2, 6)
    memory = Memory({"a": twice, "b": twice}, {"row": rows[1], "column": rows[:, 0]})
    store.commit(0, vector(0), {0: store.prepare(0, 0, memory, vector(0))})
    assert_same_bits(memory.flatten(), store[0].flatten())


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    play(federation("scaffold", memory=0, folder=tmp_path), SCHEDULE[:1])
    with pytest.raises(ValueError, match=f"{tmp_path}: holds the memory of another run"):
        federation("scaffold", memory=0, folder=tmp_path)
    federation("scaffold", memory=0, folder=tmp_path / "new")


def test_the_federations_own_folder_goes_with_it() -> None:
    fed = play(federation("scaffold", memory=0), SCHEDULE[:2])
    folder = fed.memories.folder
    assert folder is not None
    assert files(folder)
    del fed
    gc.collect()
    assert not folder.exists()


@pytest.mark.parametrize("budget", [0, 200, 1000])
@pytest.mark.parametrize("name", ["fedlesam-s", "fedsmoo", "fedlesam", "fedavg"])
def test_a_budget_changes_no_bit(name: str, budget: int, tmp_path: Path) -> None:
    plain = play(federation(name))
    tight = play(federation(name, memory=budget, folder=tmp_path))
    assert tight.memories.nbytes <= budget
    assert_same_bits(states(plain), states(tight))
    current = {f"round{t:06d}-client{c:06d}.safetensors" for c, t in tight.memories.rounds.items()}
    anchors = {f"round{t:06d}-anchor.safetensors" for t in tight.memories.rounds.values()}
    assert files(tmp_path) <= current | anchors


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("budget", [0, 300, 900])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_full_disk_commits_nothing(budget: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever write fails, of memories old or new: the round has not happened, and can be repeated."""
    plain = play(federation("fedlesam-s", dtype=torch.float32))
    fed = play(federation("fedlesam-s", dtype=torch.float32, memory=budget, folder=tmp_path), SCHEDULE[:4])
    before, index, written = snapshot(fed), dict(fed.memories.rounds), fed.memories.nbytes
    save, left = safetensors.torch.save_file, [after]

    def fills_up(*args: Any, **kwargs: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            Path(args[1]).write_bytes(b"half")
            full()
        save(*args, **kwargs)

    monkeypatch.setattr(safetensors.torch, "save_file", fills_up)
    with pytest.raises(ValueError, match=r"cannot be written: .*No space left on device.*--memory"):
        for active in SCHEDULE[4:]:
            fed.round(active)
            before, index, written = snapshot(fed), dict(fed.memories.rounds), fed.memories.nbytes
    monkeypatch.undo()
    assert_same_bits(before, states(fed))
    assert fed.memories.rounds == index
    assert fed.memories.nbytes <= written
    assert not [name for name in files(tmp_path) if name.endswith(".part")]
    play(fed, SCHEDULE[fed.state.round :])
    assert_same_bits(states(plain), states(fed))
    assert files(tmp_path) <= names_in(fed.memories), "what the failed round wrote is gone"


def names_in(store: Store) -> set[str]:
    clients = {f"round{t:06d}-client{c:06d}.safetensors" for c, t in store.rounds.items()}
    return clients | {f"round{t:06d}-anchor.safetensors" for t in store.rounds.values()}


def test_what_a_failed_round_wrote_is_collected(tmp_path: Path) -> None:
    """Clients 0 and 1 were done when client 2 failed, and the round is repeated without them."""
    wrong = [True]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if wrong[0] and len(target) == 1:
            raise ValueError("a bad batch")
        return nn.functional.cross_entropy(output, target)

    local = LocalTraining(epochs=1, batch_size=4, loss=loss)
    clients = [(torch.randn(size, 5).double(), torch.zeros(size, dtype=torch.int64)) for size in (4, 4, 5, 4)]
    fed = federation("fedlesam-s", clients=clients, local=local, memory=0, folder=tmp_path)
    with pytest.raises(ValueError, match="a bad batch"):
        fed.round([0, 1, 2])
    assert len(fed.memories) == 0
    assert len(files(tmp_path)) == 3
    fed.round([3])
    assert files(tmp_path) == {"round000000-anchor.safetensors", "round000000-client000003.safetensors"}


@pytest.fixture
def small_disk() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="fedlesam-test-"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    if os.geteuid() or shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        folder.rmdir()
        pytest.skip("a file system of 64 kB cannot be mounted here: that needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()


@pytest.mark.parametrize("budget", [0, 5000])
def test_a_disk_that_is_really_full(budget: int, small_disk: Path) -> None:
    clients = [(torch.randn(4, 30), torch.zeros(4, dtype=torch.int64)) for _ in range(40)]
    local = LocalTraining(epochs=1)
    fed = federate(nn.Linear(30, 30), clients, "scaffold", local, memory=budget, folder=small_disk / "memory")
    rounds = 0
    with pytest.raises(ValueError, match=r"No space left on device.*free some space"):
        for start in range(0, 40, 4):
            fed.round(range(start, start + 4))
            rounds += 1
    assert 2 <= rounds < 10
    assert fed.state.round == rounds
    assert list(fed.memories) == list(range(4 * rounds))
    assert all(memory.correction["c"].shape == (930,) for memory in fed.memories.values())
    assert not [name for name in files(small_disk / "memory") if name.endswith(".part")]


class AgainstADictionary(RuleBasedStateMachine):
    """Rounds in whatever order and with whatever budget: the store is a dictionary, within its budget."""

    @initialize(budget=st.one_of(st.none(), st.integers(0, 12 * UNIT)))
    def start(self, budget: int | None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fedlesam-test-"))
        self.store, self.round = Store(self.folder, budget), 0
        self.expected: dict[int, tuple[float | None, float | None]] = {}

    @rule(
        clients=st.dictionaries(st.integers(0, 7), st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=5),
        fails=st.booleans(),
    )
    def play(self, clients: dict[int, tuple[bool, bool]], fails: bool) -> None:
        anchor = vector(1000 + self.round)
        new: dict[int, Memory | None] = {}
        for client, (last, own) in clients.items():
            value = vector(10 * self.round + client)
            memory = Memory({"last": anchor} if last else {}, {"c": value} if own else {})
            new[client] = self.store.prepare(self.round, client, memory, anchor)
        self.store.make_room(self.round, anchor, new)
        if fails:
            return
        self.store.commit(self.round, anchor, new)
        for client, (last, own) in clients.items():
            self.expected[client] = (1000.0 + self.round if last else None, 10.0 * self.round + client if own else None)
        self.round += 1

    @invariant()
    def is_the_dictionary(self) -> None:
        found = {}
        for client, memory in self.store.items():
            last, own = memory.perturbation.get("last"), memory.correction.get("c")
            assert all(len(set(t.tolist())) == 1 for t in (last, own) if t is not None)
            found[client] = tuple(None if t is None else t[0].item() for t in (last, own))
        assert found == self.expected

    @invariant()
    def is_within_its_budget(self) -> None:
        resident = self.store._resident.values()
        distinct = {t.data_ptr(): t.nbytes for memory in resident for t in memory.flatten().values()}
        assert self.store.nbytes == sum(distinct.values())
        if self.store.budget is not None:
            assert self.store.nbytes <= self.store.budget

    @invariant()
    def has_no_file_too_many(self) -> None:
        loose = {f"round{t:06d}-client{c:06d}.safetensors" for t, c in self.store._uncommitted}
        anchor = {f"round{self.round:06d}-anchor.safetensors"}
        assert files(self.folder) <= names_in(self.store) | loose | anchor

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


TestAgainstADictionary = AgainstADictionary.TestCase
TestAgainstADictionary.settings = settings(max_examples=40, stateful_step_count=12)
