"""Data sets by name, splits over clients, and the batches a client trains on.

data = fl.data.load("digits")
split = fl.data.split("dirichlet:0.3", data.train.y, clients=50, seed=0)
clients = [data.shard(torch.from_numpy(indices)) for indices in split]
"""

from fedlesam.core.lazy import lazy

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
