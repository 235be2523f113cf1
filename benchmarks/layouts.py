"""Forward and backward with pictures, and with weights too, in PyTorch's two memory layouts, on one thread.

python benchmarks/layouts.py [--models cnn lenet resnet18:width=16] [--turns 9]
"""

import argparse
import copy
import functools

import torch
import torch.nn.functional as F
from measure import machine, table, take_turns
from torch import Tensor, nn

from fedlesam.core.computing import keep_freed_memory
from fedlesam.models.catalogue import make_model

WIDTHS = [f"resnet18:width={width}" for width in (16, 32, 48, 64)]


def step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--models", nargs="+", default=["cnn", "lenet", *WIDTHS])
    arguments.add_argument("--turns", type=int, default=9)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    print(machine())
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(50, 3, 32, 32, generator=draw), torch.randint(0, 10, (50,), generator=draw)
    turned = x.contiguous(memory_format=torch.channels_last)
    for spec in options.models:
        model = make_model(spec, (3, 32, 32), 10, 0)
        both = copy.deepcopy(model).to(memory_format=torch.channels_last)
        convolutions = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Conv2d))
        candidates = {
            "contiguous": functools.partial(step, model, x, y),
            "pictures channels-last": functools.partial(step, model, turned, y),
            "weights too": functools.partial(step, both, turned, y),
        }
        title = f"{spec}, {convolutions / 1e6:.1f} million weights in convolutions"
        print(table(title, take_turns(candidates, options.turns, warm_up=2)), flush=True)


main()
