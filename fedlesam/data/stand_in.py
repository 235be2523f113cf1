"""Public data sets without their files: zeros of their form, enough to say what a run would need."""

import numpy as np
import torch

from fedlesam.data import catalogue
from fedlesam.data._load import IMAGENET_MEAN, IMAGENET_STD
from fedlesam.data.catalogue import DOMAIN_SETS, FILE_SETS, OFFICIAL
from fedlesam.data.dataset import DataSet, Domains, Images, Owners
from fedlesam.data.formats import shakespeare

LISTED = 10
"""Of so many pictures of a domain, three are in the publishers' test lists."""


def is_public(name: str) -> bool:
    """Whether a name stands for a public data set, of which much is known without its files.

    Args:
        name: As for `load`.
    """
    return name in OFFICIAL or name.partition(":")[0] in DOMAIN_SETS.keys() | FILE_SETS.keys()


def stand_in(name: str) -> DataSet:
    """Zeros, stored once, with classes and natural clients of equal size; of words as many as a vocabulary may have.

    Args:
        name: Of a public data set, with its options.

    Raises:
        ValueError: An option or its value is not known.
    """
    first = name.partition(":")[0]
    return _domains(name) if first in DOMAIN_SETS else _files(name) if first in FILE_SETS else _official(name)


def _zeros(count: int, shape: tuple[int, ...], classes: int, dtype: torch.dtype = torch.uint8) -> Images:
    return Images(torch.zeros((), dtype=dtype).expand(count, *shape), torch.arange(count) % classes)


def _official(name: str) -> DataSet:
    known = OFFICIAL[name]
    train, test = (_zeros(count, known.shape, len(known.classes)) for count in (known.train, 10_000))
    return DataSet(name, train, test, known.classes, known.mean, known.std)


def _domains(name: str) -> DataSet:
    request = catalogue.parse_domains(name)
    known = DOMAIN_SETS[name.partition(":")[0]]
    most = (request.limit or catalogue.MOST) * known.classes
    of = np.repeat(np.arange(len(known.domains)), np.minimum(known.pictures, most))
    listed = np.arange(len(of)) % LISTED < 3 if request.official_lists else None
    train, test = (_zeros(count, (3, request.size, request.size), known.classes) for count in (len(of), 0))
    classes = tuple(map(str, range(known.classes)))
    domains = Domains(known.domains, of, listed)
    return DataSet(name, train, test, classes, IMAGENET_MEAN, IMAGENET_STD, domains=domains)


def _files(name: str) -> DataSet:
    request = catalogue.parse_files(name)
    known, options = request.known, request.options
    shape, classes, mean = known.shape, known.classes, (0.5,) * len(known.shape[:1])
    vocabulary: tuple[str, ...] = ()
    counts = [known.train, known.test]
    if "stride" in options:
        shape, classes, vocabulary = (shakespeare.LENGTH,), shakespeare.VOCABULARY, shakespeare.VOCABULARY
        counts = [-(-count * known.options["stride"] // options["stride"]) for count in counts]
    elif "words" in options:
        shape, vocabulary = (options["length"],), ("",) * options["words"]
    dtype = torch.int32 if vocabulary else torch.uint8
    train, test = (_zeros(count, shape, len(classes), dtype) for count in counts)
    owners = None
    if known.clients:
        clients = min(known.clients, len(train))
        of, theirs = (np.arange(len(part)) % clients for part in (train, test))
        owners = Owners(tuple(map(str, range(clients))), of, None if known.client else theirs)
    return DataSet(name, train, test, classes, mean, mean, owners=owners, vocabulary=vocabulary)
