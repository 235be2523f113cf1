"""Splits by the text a user types, and as files."""

import dataclasses
import hashlib
import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from fedlesam.data import load
from fedlesam.data.dataset import DataSet
from fedlesam.data.splits import Split, load_split, make_split, save_split, split

DIGITS = load("digits")
SAMPLES = 1437
DRAWN = [
    "iid",
    "dirichlet:0.1",
    "dirichlet:1e4",
    "dirichlet:0.3,repeat",
    "dirichlet-by-class:0.5",
    "pathological:3",
    "pathological:2,repeat",
]


def parts(split: Split) -> list[list[int]]:
    return [part.tolist() for part in split.clients]


@pytest.mark.parametrize("spec", DRAWN)
def test_a_seed_is_a_split(spec: str) -> None:
    one, same, other = (make_split(spec, DIGITS, 20, seed) for seed in (4, 4, 5))
    assert parts(one) == parts(same)
    assert one.hash == same.hash
    assert one.hash != other.hash
    assert parts(one) != parts(other)
    assert one.scheme == spec.replace("1e4", "10000")
    assert len(one.clients) == 20
    assert ("repeat" in spec) == (one.repeats > 0)


def test_the_number_after_the_colon_counts() -> None:
    labels = DIGITS.train.y.numpy()
    held = [
        (make_split(spec, DIGITS, 20, 0).class_counts(labels, 10) > 0).sum(1).mean()
        for spec in ("dirichlet:0.01", "dirichlet:100", "pathological:2", "pathological:7")
    ]
    assert held[0] < 5
    assert held[1] > 9.5
    assert held[2:] == [2, 7]


def test_pooled_needs_no_number() -> None:
    assert parts(make_split("pooled", DIGITS, None, 0)) == [list(range(SAMPLES))]
    assert parts(make_split("pooled", DIGITS, 1, 0)) == [list(range(SAMPLES))]


@pytest.mark.parametrize(
    ("spec", "clients", "message"),
    [
        ("dirichlet:0", 5, "dirichlet:0: the number after the colon must be above 0, got 0"),
        ("dirichlet:-1", 5, "dirichlet:-1: the number after the colon must be above 0, got -1"),
        ("dirichlet:nan", 5, "must be above 0, got nan"),
        ("dirichlet:inf", 5, "got inf"),
        ("dirichlet:x", 5, "dirichlet:x: expected a number after the colon, e.g. dirichlet:1"),
        ("dirichlet", 5, "expected a number after the colon"),
        ("dirichlet:", 5, "expected a number after the colon"),
        ("dirichlet:0.1,again", 5, "after the comma only `repeat` is known, got 'again'"),
        ("dirichlet-by-class:0", 5, "must be above 0"),
        ("dirichlet-by-class:1,repeat", 5, "unknown split 'dirichlet-by-class:1,repeat'"),
        ("pathological:2.5", 5, "pathological takes a whole number of classes"),
        ("pathological:0", 5, "must be above 0"),
        ("pathological:11", 5, "gives every client 11 classes, but the data set has only 10"),
        (
            "pathological:3",
            500,
            "pathological:3 cannot serve 500 clients .* at most 4.. clients.*pathological:3,repeat",
        ),
        ("iid", 1438, "1438 clients are more than the 1437 training samples"),
        ("dirichlet:0.1", 1438, "1438 clients are more than the 1437"),
        ("dirichlet-by-class:0.1", 1438, "1438 clients are more than the 1437"),
        ("iid", 0, "split iid: the number of clients must be at least 1, got 0"),
        ("iid", None, "split iid: needs a number of clients, --clients N"),
        ("pooled", 3, "pooled has 1 client, got 3"),
        ("dirichlt:0.1", 5, r"unknown split 'dirichlt:0.1': did you mean 'dirichlet:B\[,repeat\]'"),
        ("pathologicl:2", 5, "did you mean 'pathological:A"),
        ("idd", 5, "unknown split 'idd': did you mean 'iid'"),
        ("iid:3", 5, "unknown split 'iid:3': did you mean 'iid'"),
        ("poled", 5, "did you mean 'pooled'"),
        ("", 5, "unknown split ''"),
        ("no_such_module:f", 5, "split 'no_such_module:f': cannot import 'no_such_module'"),
        ("math:nothing", 5, "module 'math' has no 'nothing'"),
        ("math:pi", 5, "split math:pi: expected a callable"),
        ("by:/no/such/file", None, "split by:/no/such/file: cannot read the client ids"),
        ("file:/no/such/file", None, "split file:/no/such/file: cannot be read as a saved split.*`fedlesam split`"),
    ],
)
def test_bad_names_are_refused(spec: str, clients: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_split(spec, DIGITS, clients, 0)


def test_your_own_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "split_of_mine.py").write_text(
        "import numpy as np\n"
        "def thirds(labels, clients, seed):\n"
        "    return np.array_split(np.arange(len(labels)), clients + seed)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    split = make_split("split_of_mine:thirds", DIGITS, 2, seed=1)
    assert split.sizes.tolist() == [479, 479, 479]
    assert split.scheme == "split_of_mine:thirds"


def ids() -> list[int]:
    return [(i * 7) % 12 - 2 for i in range(SAMPLES)]


@pytest.mark.parametrize("kind", ["txt", "csv", "npy", "blank lines"])
def test_natural_partitions(tmp_path: Path, kind: str) -> None:
    owners = ids()
    if kind == "npy":
        path = tmp_path / "ids.npy"
        np.save(path, np.array(owners))
    elif kind == "csv":
        path = tmp_path / "ids.csv"
        path.write_text("".join(f'{i},"a, b",{owner}\n' for i, owner in enumerate(owners)))
    else:
        path = tmp_path / "ids"
        path.write_text(("\n\n" if kind == "blank lines" else "\n").join(map(str, owners)))
    split = make_split(f"by:{path}", DIGITS, None, 0)
    expected = [[i for i in range(SAMPLES) if owners[i] == owner] for owner in range(-2, 10)]
    assert parts(split) == expected, "numbers are sorted as numbers: 9 comes before 10, -2 before -1"
    assert (split.repeats, split.dropped) == (0, 0)
    assert parts(make_split(f"by:{path}", DIGITS, 12, 0)) == expected
    with pytest.raises(ValueError, match="has 12 clients, not 11"):
        make_split(f"by:{path}", DIGITS, 11, 0)


def test_owners_may_have_any_names(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_text("\n".join(["Ny, Bo", "Ny, Al", "--5"][i % 3] for i in range(SAMPLES)), encoding="utf-8")
    split = make_split(f"by:{path}", DIGITS, None, 0)
    assert [part[0] for part in parts(split)] == [2, 1, 0], "a line is a name, commas and all, in the sorted order"


@pytest.mark.parametrize("count", [0, SAMPLES - 1, SAMPLES + 1])
def test_as_many_owners_as_samples(tmp_path: Path, count: int) -> None:
    path = tmp_path / "ids.txt"
    path.write_text("".join(f"{i % 5}\n" for i in range(count)))
    with pytest.raises(ValueError, match=f"has {count} client ids, the training set has 1437 samples"):
        make_split(f"by:{path}", DIGITS, None, 0)


class Touch:
    """An object whose unpickling leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, (f"open({str(self.mark)!r}, 'w').close()",)


def test_a_pickled_npy_is_refused_unopened(tmp_path: Path) -> None:
    mark, path = tmp_path / "mark", tmp_path / "ids.npy"
    np.save(path, np.array([Touch(mark)] * SAMPLES, dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="cannot read the client ids"):
        make_split(f"by:{path}", DIGITS, None, 0)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Touch(mark)))
    assert mark.exists(), "the object would have left its mark"


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY\x01\x00", b"PK\x03\x04zip", b"1\n2\n"])
def test_a_damaged_npy_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ids.npy"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"split by:{path}: cannot read the client ids"):
        make_split(f"by:{path}", DIGITS, None, 0)


def test_text_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "ids.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot read the client ids"):
        make_split(f"by:{path}", DIGITS, None, 0)


@pytest.mark.parametrize("spec", DRAWN)
def test_file_round_trip(tmp_path: Path, spec: str) -> None:
    split, path = make_split(spec, DIGITS, 9, 2), tmp_path / "new folder" / "split"
    save_split(split, DIGITS, path)
    assert [p.name for p in path.parent.iterdir()] == ["split"], "nothing half-written is left"
    back = make_split(f"file:{path}", DIGITS, None, seed=77)
    assert parts(back) == parts(split)
    assert back.hash == split.hash
    assert (back.samples, back.repeats, back.dropped) == (split.samples, split.repeats, split.dropped)
    assert parts(make_split(f"file:{path}", DIGITS, 9, 0)) == parts(split)
    with pytest.raises(ValueError, match="has 9 clients, not 8"):
        make_split(f"file:{path}", DIGITS, 8, 0)


def test_the_file_says_what_it_is(tmp_path: Path) -> None:
    split, path = make_split("pathological:2", DIGITS, 7, 0), tmp_path / "split"
    save_split(split, DIGITS, path)
    with safe_open(path, framework="np") as file:
        about = json.loads(file.metadata()["split"])
        counts, sizes, indices = (file.get_tensor(name) for name in ("class_counts", "sizes", "indices"))
    assert about["scheme"] == "pathological:2"
    assert about["data"] == "digits"
    content = np.array([len(p) for p in split.clients], "<i8").tobytes() + indices.astype("<i8").tobytes()
    assert about["hash"] == hashlib.sha256(content).hexdigest()
    assert sizes.tolist() == split.sizes.tolist()
    labels = DIGITS.train.y.numpy()
    assert counts.tolist() == [[int((labels[p] == c).sum()) for c in range(10)] for p in split.clients]


def test_another_data_sets_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "split"
    other: DataSet = dataclasses.replace(DIGITS, name="others", fingerprint="something else")
    save_split(make_split("iid", other, 5, 0), other, path)
    with pytest.raises(ValueError, match=f"split file:{path}: divides the data set 'others', not .*'digits'"):
        load_split(path, DIGITS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Split, bytes]:
    path = tmp_path_factory.mktemp("saved") / "split"
    split = make_split("dirichlet:0.1", DIGITS, 6, 0)
    save_split(split, DIGITS, path)
    return split, path.read_bytes()


@given(at=st.floats(0, 0.9999), flip=st.integers(1, 255))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_byte_never_gives_another_split(
    tmp_path: Path, saved: tuple[Split, bytes], at: float, flip: int
) -> None:
    split, content = saved
    damaged = bytearray(content)
    damaged[int(at * len(content))] ^= flip
    path = tmp_path / "split"
    path.write_bytes(damaged)
    try:
        back = load_split(path, DIGITS)
    except ValueError as error:
        assert f"file:{path}" in str(error)
    else:
        assert parts(back) == parts(split)


def test_a_changed_sample_is_noticed(tmp_path: Path, saved: tuple[Split, bytes]) -> None:
    split, content = saved
    first = split.clients[0].astype("<i8").tobytes()
    at = content.index(first)
    damaged = bytearray(content)
    damaged[at] ^= 1
    (tmp_path / "split").write_bytes(damaged)
    with pytest.raises(ValueError, match="is damaged, its checksum does not match"):
        load_split(tmp_path / "split", DIGITS)


@pytest.mark.parametrize("left", [0, 4, 8, 100, 500, -100, -8, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, saved: tuple[Split, bytes], left: int) -> None:
    path = tmp_path / "split"
    path.write_bytes(saved[1][:left])
    with pytest.raises(ValueError, match="cannot be read as a saved split"):
        load_split(path, DIGITS)


def test_files_that_are_no_splits(tmp_path: Path) -> None:
    path = tmp_path / "split"
    path.write_text("0\n1\n" * 100)
    with pytest.raises(ValueError, match="cannot be read as a saved split"):
        load_split(path, DIGITS)
    save_file({"fc.weight": torch.ones(3)}, path)
    with pytest.raises(ValueError, match="cannot be read as a saved split"):
        load_split(path, DIGITS)
    save_file({"sizes": torch.tensor([1]), "indices": torch.tensor([0])}, path)
    with pytest.raises(ValueError, match="is not a saved split"):
        load_split(path, DIGITS)
    with pytest.raises(ValueError, match="cannot be read as a saved split"):
        load_split(tmp_path, DIGITS)


@pytest.mark.parametrize(
    ("sizes", "indices", "message"),
    [
        ([2], [0], "is not a saved split"),
        ([], [], "is not a saved split"),
        ([[1]], [0], "is not a saved split"),
        ([1, 0], [0], "outside 0 to 1436 or an empty client"),
        ([2], [0, SAMPLES], "outside 0 to 1436"),
        ([2], [0, -1], "outside 0 to 1436"),
        ([1.0, 1.0], [0, 1], "is not a saved split"),
        ([2], [0.0, 1.0], "is not a saved split"),
    ],
)
def test_contents_that_make_no_sense(tmp_path: Path, sizes: list[int], indices: list[int], message: str) -> None:
    about = {"scheme": "x", "data": "digits", "fingerprint": DIGITS.fingerprint, "hash": "?"}
    dtypes = [
        torch.float64 if any(isinstance(v, float) for v in values) else torch.int64 for values in (sizes, indices)
    ]
    tensors = {
        "sizes": torch.tensor(sizes, dtype=dtypes[0]),
        "indices": torch.tensor(indices, dtype=dtypes[1]),
    }
    save_file(tensors, tmp_path / "split", metadata={"split": json.dumps(about)})
    with pytest.raises(ValueError, match=message):
        load_split(tmp_path / "split", DIGITS)


def test_a_split_of_labels_alone() -> None:
    made = split("dirichlet:0.3", [0, 1, 2] * 20, clients=6, seed=1)
    assert len(made) == 6
    assert [part.tolist() for part in made] == parts(made)
    assert sorted(i for part in made for i in part.tolist()) == list(range(60))


@pytest.mark.parametrize("labels", [[0.5, 1.0], [[0, 1]], [], [-1, 0], ["a"]])
def test_labels_that_are_none(labels: list[object]) -> None:
    with pytest.raises(ValueError, match="split iid: labels must be whole class numbers from 0"):
        split("iid", labels, clients=1)


@pytest.mark.parametrize("spec", ["leave-out:oil", "file:x"])
def test_schemes_that_need_more_than_labels(spec: str) -> None:
    with pytest.raises(ValueError, match="needs the data set, not only its labels"):
        split(spec, [0, 1])
