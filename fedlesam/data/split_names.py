"""A split by the text a user types, e.g. `dirichlet:0.1,repeat`, and as a file."""

import csv
import json
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fedlesam import seeds
from fedlesam.data import splits
from fedlesam.data.dataset import DataSet
from fedlesam.data.domain_sets import DOMAIN_SETS, plain
from fedlesam.data.splits import Indices, Split
from fedlesam.names import imported, is_path, one_line, unknown

SCHEMES = {
    "iid": "the same mixture for every client, equal sizes",
    "pooled": "one client with everything: centralised training",
    "dirichlet:B[,repeat]": "equal sizes, class proportions drawn from Dirichlet(B); the smaller B, the more skewed",
    "dirichlet-by-class:B": "unequal sizes, each class divided over the clients by Dirichlet(B)",
    "pathological:A[,repeat]": "every client has exactly A classes, equal sizes",
    "leave-out:DOMAIN[,M]": "test on one domain, train on the others, each divided over M clients (1)",
    "by:FILE": "a client id per training sample (text: one a line; .csv: the last column; .npy): natural partitions",
    "file:PATH": "a split saved by `fedlesam split --save PATH`",
    "MODULE:CALLABLE": "your own: callable(labels, clients, seed) -> a list of sample numbers per client",
}


def make_split(spec: str, data: DataSet, clients: int | None, seed: int) -> Split:
    """`clients` None takes the scheme's own number where it has one (pooled, leave-out, by, file)."""
    split = _make(spec, data, clients, seed)
    if data.domains is not None and split.test is None:
        raise ValueError(
            f"split {spec}: {data.name} has domains, of which one is to be left out for the test: "
            f"leave-out:DOMAIN with one of {', '.join(data.domains.names)}"
        )
    return split


def _make(spec: str, data: DataSet, clients: int | None, seed: int) -> Split:
    labels = data.train.y.numpy()
    name, _, argument = spec.partition(":")
    if name == "leave-out":
        return _same_number(_leave_out(spec, argument, data, seed), clients)
    if name == "by":
        return _same_number(_by_file(Path(argument), len(labels)), clients)
    if name == "file":
        return _same_number(load_split(Path(argument), data), clients)
    wanted = clients if clients is not None else 1 if name == "pooled" else None
    if wanted is None or wanted < 1:
        raise ValueError(f"split {spec}: the number of clients must be at least 1, got {clients}")
    draw = np.random.default_rng(seeds.derive(seed, "split"))
    value, flag = (
        _arguments(spec, argument) if name in ("dirichlet", "dirichlet-by-class", "pathological") else (0.0, False)
    )
    if name == "dirichlet":
        return splits.dirichlet(labels, wanted, draw, beta=value, repeat=flag)
    if name == "dirichlet-by-class" and not flag:
        return splits.dirichlet_by_class(labels, wanted, draw, beta=value)
    if name == "pathological":
        if value != int(value):
            raise ValueError(f"split {spec}: pathological takes a whole number of classes, e.g. pathological:3")
        return splits.pathological(labels, wanted, draw, a=int(value), repeat=flag)
    if spec in ("iid", "pooled"):
        return (splits.iid if spec == "iid" else splits.pooled)(labels, wanted, draw)
    if is_path(spec):
        return splits.own(labels, wanted, seed, imported("split", spec), spec)
    raise unknown("split", spec, SCHEMES)


def _leave_out(spec: str, argument: str, data: DataSet, seed: int) -> Split:
    if data.domains is None:
        raise ValueError(f"split {spec}: {data.name} has no domains; domains:PATH and {', '.join(DOMAIN_SETS)} have")
    domain, comma, count = argument.partition(",")
    numbers = {plain(name): number for number, name in enumerate(data.domains.names)}
    if plain(domain) not in numbers:
        raise unknown(f"domain of {data.name}", domain, data.domains.names)
    if comma and not (count.isdecimal() and int(count)):
        raise ValueError(f"split {spec}: after the comma the clients of each domain are expected, e.g. {domain},10")
    draw = np.random.default_rng(seeds.derive(seed, "split"))
    return splits.leave_out(data.domains, numbers[plain(domain)], draw, per_domain=int(count) if comma else 1)


def _arguments(spec: str, argument: str) -> tuple[float, bool]:
    number, _, flag = argument.partition(",")
    try:
        value = float(number)
    except ValueError:
        raise ValueError(f"split {spec}: expected a number after the colon, e.g. {spec.partition(':')[0]}:1") from None
    if not (np.isfinite(value) and value > 0):
        raise ValueError(f"split {spec}: the number after the colon must be above 0, got {number}")
    if flag not in ("", "repeat"):
        raise ValueError(f"split {spec}: after the comma only `repeat` is known, got {flag!r}")
    return value, flag == "repeat"


def _same_number(split: Split, clients: int | None) -> Split:
    if clients is not None and clients != len(split.clients):
        raise ValueError(f"split {split.scheme}: has {len(split.clients)} clients, not {clients}; leave the number out")
    return split


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
    whole = all(str(owner).removeprefix("-").isdecimal() and len(str(owner)) < 19 for owner in owners)
    return splits.by_owner([int(owner) for owner in owners] if whole else owners, f"by:{path}")


def save_split(split: Split, data: DataSet, path: Path) -> None:
    """A safetensors file that knows which data set it divides."""
    about = {"scheme": split.scheme, "data": data.name, "fingerprint": data.fingerprint, "hash": split.hash}
    tensors = {
        "sizes": torch.from_numpy(split.sizes.astype(np.int64)),
        "indices": torch.from_numpy(np.concatenate(split.clients).astype(np.int64)),
        "class_counts": torch.from_numpy(split.class_counts(data.train.y.numpy(), len(data.classes)).astype(np.int64)),
    }
    if split.test is not None:
        tensors["test"] = torch.from_numpy(split.test.astype(np.int64))
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    save_file(tensors, beside, metadata={"split": json.dumps(about)})
    beside.replace(path)


def load_split(path: Path, data: DataSet) -> Split:
    where = f"split file:{path}"
    try:
        with safe_open(path, framework="np") as file:
            about = json.loads((file.metadata() or {}).get("split", "null"))
            sizes: Indices = file.get_tensor("sizes")
            indices: Indices = file.get_tensor("indices")
            test: Indices | None = file.get_tensor("test") if "test" in file.keys() else None  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            one_line(f"{where}: cannot be read as a saved split: {error}; make one with `fedlesam split`")
        ) from error
    if (
        not isinstance(about, dict)
        or not sizes.dtype == indices.dtype == np.int64
        or indices.ndim != 1
        or sizes.ndim != 1
        or sizes.sum() != len(indices)
        or not len(sizes)
        or (test is not None and (test.dtype != np.int64 or test.ndim != 1 or not len(test)))
    ):
        raise ValueError(f"{where}: is not a saved split; make one with `fedlesam split ... --save {path}`")
    if about.get("fingerprint") != data.fingerprint:
        raise ValueError(f"{where}: divides the data set {about.get('data')!r}, not this copy of {data.name!r}")
    named = indices if test is None else np.concatenate([indices, test])
    if sizes.min() < 1 or named.min() < 0 or named.max() >= len(data.train):
        raise ValueError(f"{where}: names samples outside 0 to {len(data.train) - 1} or an empty client")
    split = Split(f"file:{path}", np.split(indices, np.cumsum(sizes)[:-1]), len(data.train), test=test)
    if split.hash != about.get("hash"):
        raise ValueError(f"{where}: is damaged, its checksum does not match; make it again with `fedlesam split`")
    return split
