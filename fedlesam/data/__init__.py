"""Data sets by name, splits over clients, and the batches a client trains on.

data = fl.data.load("digits")
split = fl.data.split("dirichlet:0.3", data.train.y, clients=50, seed=0)
clients = [data.shard(torch.from_numpy(indices)) for indices in split]
"""

from typing import TYPE_CHECKING

from fedlesam.core.lazy import lazy

if TYPE_CHECKING:
    from fedlesam.data._check import check as check
    from fedlesam.data._schemes import Split as Split
    from fedlesam.data.augment import flip as flip
    from fedlesam.data.augment import flip_and_crop as flip_and_crop
    from fedlesam.data.catalogue import NAMES as NAMES
    from fedlesam.data.catalogue import load as load
    from fedlesam.data.dataset import DataSet as DataSet
    from fedlesam.data.dataset import Domains as Domains
    from fedlesam.data.dataset import Images as Images
    from fedlesam.data.dataset import Shard as Shard
    from fedlesam.data.dataset import select as select
    from fedlesam.data.download import fetch as fetch
    from fedlesam.data.splits import SCHEMES as SCHEMES
    from fedlesam.data.splits import load_split as load_split
    from fedlesam.data.splits import save_split as save_split
    from fedlesam.data.splits import split as split

_HOMES = {
    **dict.fromkeys(("DataSet", "Domains", "Images", "Shard", "select"), "dataset"),
    **dict.fromkeys(("SCHEMES", "load_split", "save_split", "split"), "splits"),
    **dict.fromkeys(("NAMES", "load"), "catalogue"),
    **dict.fromkeys(("flip", "flip_and_crop"), "augment"),
    "Split": "_schemes",
    "check": "_check",
    "fetch": "download",
}
__all__ = [*_HOMES]
__getattr__, __dir__ = lazy(__name__, _HOMES)
