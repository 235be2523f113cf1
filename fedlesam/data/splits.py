"""Divide training samples over clients by the text a user types, e.g. `dirichlet:0.1,repeat`; splits as files."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedlesam.core import seeds, state
from fedlesam.core.names import imported, is_path, one_line, unknown
from fedlesam.data import _schemes
from fedlesam.data._schemes import Indices
from fedlesam.data._schemes import Split as Split
from fedlesam.data.catalogue import DOMAIN_SETS, plain
from fedlesam.data.catalogue import SCHEMES as SCHEMES
from fedlesam.data.dataset import DataSet

MISSING = ("", "nan", "nat", "<na>", "inf", "-inf")
"""Client ids that are none: how numpy and pandas write that a value is missing."""


NATURAL = ("shakespeare", "mnist-writers", "femnist", "leaf:PATH", "texts:PATH with a client a line")
BY_CLASS = ("dirichlet", "dirichlet-by-class", "pathological")
"""Schemes that divide samples by their class."""


def split(spec: str, labels: Any, clients: int | None = None, seed: int = 0) -> Split:
    """Divide samples over clients, e.g. `split("dirichlet:0.3", labels, clients=50)`.

    Args:
        spec: The scheme, one of `SCHEMES`.
        labels: The class number of every training sample: a tensor, an array or a list; or a DataSet, which the
            schemes `leave-out`, `natural` and `file` need.
        clients: The number of clients; None for schemes that have their own (pooled, leave-out, natural, by, file).
        seed: The same seed gives the same split on any machine.

    Returns:
        The split. Iterating over it gives, for every client, the numbers of its samples; `split.test` has those left
        out for the test.

    Raises:
        ValueError: The scheme is not known, or cannot serve so many clients.
    """
    if isinstance(labels, DataSet):
        return make_split(spec, labels, clients, seed)
    y = labels.detach().cpu().numpy() if isinstance(labels, torch.Tensor) else np.asarray(labels)
    if y.ndim != 1 or not len(y) or not np.issubdtype(y.dtype, np.integer) or y.min() < 0:
        raise ValueError(
            f"split {spec}: labels must be whole class numbers from 0, one per sample, got {y.dtype} of shape {y.shape}"
        )
    return _make(spec, y.astype(np.int64), None, clients, seed)


def make_split(spec: str, data: DataSet, clients: int | None, seed: int) -> Split:
    """Divide the training samples of a data set; the arguments are those of `split`.

    Args:
        spec: As `split` takes it, or one of the schemes that need the whole data set.
        data: The data set.
        clients: How many; None where the scheme brings its own number.
        seed: All random draws derive from it.
    """
    if not data.classes and spec.partition(":")[0] in BY_CLASS:
        raise ValueError(
            f"split {spec}: needs a class number for each sample, and the targets of {data.name} are not class "
            "numbers; use iid, pooled or by:FILE"
        )
    made = _make(spec, data.labels, data, clients, seed)
    if data.domains is not None and made.test is None:
        raise ValueError(
            f"split {spec}: {data.name} has domains, and one of them must be left out for the test: leave-out:DOMAIN "
            f"with one of {', '.join(data.domains.names)}"
        )
    return made


def _make(spec: str, labels: Indices, data: DataSet | None, clients: int | None, seed: int) -> Split:
    name, _, argument = spec.partition(":")
    rng = np.random.default_rng(seeds.derive(seed, "split"))
    if name in ("leave-out", "file", "by") or spec == "natural":
        if name == "by":
            made = _by_file(Path(argument), len(labels))
        elif spec == "natural":
            made = _natural(data)
        elif data is None:
            raise ValueError(f"split {spec}: needs the data set, not only its labels")
        else:
            made = _leave_out(spec, argument, data, rng) if name == "leave-out" else load_split(Path(argument), data)
        if clients not in (None, len(made)):
            raise ValueError(f"split {made.scheme}: has {len(made)} clients, not {clients}; leave the number out")
        return made
    wanted = clients if clients is not None else 1 if name == "pooled" else 0
    if wanted < 1 and clients is None:
        whole = ", or the split leave-out:DOMAIN" if data is not None and data.domains is not None else ""
        raise ValueError(f"split {spec}: needs a number of clients, --clients N{whole}")
    if wanted < 1:
        raise ValueError(f"split {spec}: the number of clients must be at least 1, got {clients}")
    if spec in ("iid", "pooled"):
        return (_schemes.iid if spec == "iid" else _schemes.pooled)(labels, wanted, rng)
    if name in ("dirichlet", "dirichlet-by-class", "pathological"):
        value, repeat = _arguments(spec, argument)
        if name == "dirichlet":
            return _schemes.dirichlet(labels, wanted, rng, beta=value, repeat=repeat)
        if name == "pathological":
            return _schemes.pathological(labels, wanted, rng, a=int(value), repeat=repeat)
        if not repeat:
            return _schemes.dirichlet_by_class(labels, wanted, rng, beta=value)
    if is_path(spec):
        return _schemes.from_callable(labels, wanted, seed, imported("split", spec), spec)
    raise unknown("split", spec, SCHEMES)


def _natural(data: DataSet | None) -> Split:
    if data is None or data.owners is None:
        whose = "labels alone have no clients" if data is None else f"{data.name} has no clients of its own"
        raise ValueError(
            f"split natural: {whose}; data sets that have some are "
            f"{', '.join(NATURAL)}; name those of others with by:FILE"
        )
    return _schemes.natural(data.owners)


def _leave_out(spec: str, argument: str, data: DataSet, rng: np.random.Generator) -> Split:
    if data.domains is None:
        raise ValueError(f"split {spec}: {data.name} has no domains; domains:PATH and {', '.join(DOMAIN_SETS)} have")
    domain, comma, count = argument.partition(",")
    numbers = {plain(name): number for number, name in enumerate(data.domains.names)}
    if plain(domain) not in numbers:
        raise unknown(f"domain of {data.name}", domain, data.domains.names)
    if comma and not (count.isdecimal() and int(count)):
        raise ValueError(f"split {spec}: after the comma the clients of each domain are expected, e.g. {domain},10")
    return _schemes.leave_out(data.domains, numbers[plain(domain)], rng, per_domain=int(count) if comma else 1)


def _arguments(spec: str, argument: str) -> tuple[float, bool]:
    number, _, flag = argument.partition(",")
    name = spec.partition(":")[0]
    try:
        value = float(number)
    except ValueError:
        raise ValueError(f"split {spec}: expected a number after the colon, e.g. {name}:1") from None
    if not (np.isfinite(value) and value > 0):
        raise ValueError(f"split {spec}: the number after the colon must be above 0, got {number}")
    if flag not in ("", "repeat"):
        raise ValueError(f"split {spec}: after the comma only `repeat` is known, got {flag!r}")
    if name == "pathological" and not (value.is_integer() and value < 1e9):
        raise ValueError(f"split {spec}: pathological takes a whole number of classes, e.g. pathological:3")
    return value, flag == "repeat"


def _by_file(path: Path, samples: int) -> Split:
    try:
        if path.suffix == ".npy":
            with path.open("rb") as binary:
                owners = np.lib.format.read_array(binary, allow_pickle=False).reshape(-1).tolist()
        elif path.suffix == ".csv":
            with path.open(newline="", encoding="utf-8") as file:
                owners = [row[-1].strip() for row in csv.reader(file) if row]
        else:
            owners = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except Exception as error:  # numpy raises many kinds for a damaged header
        raise ValueError(one_line(f"split by:{path}: cannot read the client ids: {error}")) from error
    if len(owners) != samples:
        raise ValueError(f"split by:{path}: has {len(owners)} client ids, the training set has {samples} samples")
    missing = next((i for i, owner in enumerate(owners) if str(owner).lower() in MISSING), None)
    if missing is not None:
        raise ValueError(
            f"split by:{path}: sample {missing} (row {missing + 1} of those with an entry) has no client id, "
            f"got {str(owners[missing])!r}; give it one, or leave the sample out of the data"
        )
    whole = all(str(owner).removeprefix("-").isdecimal() and len(str(owner)) < 19 for owner in owners)
    return _schemes.by_owner([int(owner) for owner in owners] if whole else owners, f"by:{path}")


def save_split(split: Split, data: DataSet, path: Path) -> None:
    """Write a split to a safetensors file, with the fingerprint of the data set that it divides.

    Args:
        split: The split.
        data: The data set.
        path: The file; it is replaced as a whole.
    """
    metadata = {"scheme": split.scheme, "data": data.name, "fingerprint": data.fingerprint, "hash": split.hash}
    counts = split.class_counts(data.labels, max(1, len(data.classes)))
    arrays = {"sizes": split.sizes, "indices": np.concatenate(split.clients), "class_counts": counts}
    arrays |= {} if split.test is None else {"test": split.test}
    if split.tests is not None:
        metadata["tests_in"] = split.tests_in
        arrays |= {"test_sizes": np.array([*map(len, split.tests)]), "test_indices": np.concatenate(split.tests)}
    state.save(path, {name: torch.from_numpy(array.astype(np.int64)) for name, array in arrays.items()}, split=metadata)


def load_split(path: Path, data: DataSet) -> Split:
    """Read a split that `save_split` wrote.

    Args:
        path: The file.
        data: The data set that it divides.

    Raises:
        ValueError: The file is damaged, or the split is of another data set.
    """
    where = f"split file:{path}"
    try:
        tensors, header = state.load(path)
        found = {name: tensor.numpy().copy() for name, tensor in tensors.items()}
        sizes, indices, test, metadata = found["sizes"], found["indices"], found.get("test"), header.get("split")
    except state.UNREADABLE as error:
        reason = f"cannot be read as a saved split: {error}; make one with `fedlesam split`"
        raise ValueError(one_line(f"{where}: {reason}")) from error
    arrays = [sizes, indices] if test is None else [sizes, indices, test]
    whole = all(array.dtype == np.int64 and array.ndim == 1 and len(array) for array in arrays)
    if not isinstance(metadata, dict) or not whole or sizes.sum() != len(indices):
        raise ValueError(f"{where}: is not a saved split; make one with `fedlesam split ... --save {path}`")
    if metadata.get("fingerprint") != data.fingerprint:
        raise ValueError(f"{where}: divides the data set {metadata.get('data')!r}, not this copy of {data.name!r}")
    named = np.concatenate(arrays[1:])
    if sizes.min() < 1 or named.min() < 0 or named.max() >= len(data.train):
        raise ValueError(f"{where}: names samples outside 0 to {len(data.train) - 1} or an empty client")
    split = Split(f"file:{path}", np.split(indices, np.cumsum(sizes)[:-1]), len(data.train), test=test)
    if "test_sizes" in found:
        split = _with_tests(split, found, metadata.get("tests_in", "test"), data)
    if split.hash != metadata.get("hash"):
        raise ValueError(f"{where}: is damaged, its checksum does not match; make it again with `fedlesam split`")
    return split


def _with_tests(split: Split, found: dict[str, Any], tests_in: Any, data: DataSet) -> Split:
    """With the clients' own test samples, as a file has them."""
    sizes, indices = found["test_sizes"], found.get("test_indices")
    if tests_in not in ("train", "test") or indices is None or sizes.shape != (len(split),) or (sizes < 0).any():
        raise ValueError(f"split {split.scheme}: is damaged in its clients' test samples; make it again")
    size = len(data.train if tests_in == "train" else data.test)
    if sizes.sum() != len(indices) or not np.isin(indices, np.arange(size)).all():
        raise ValueError(f"split {split.scheme}: its clients' test samples are not those of {data.name}")
    return replace(split, tests=np.split(indices, np.cumsum(sizes)[:-1]), tests_in=tests_in)
