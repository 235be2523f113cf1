"""Less than a whole data set: fewer training samples, and training samples held out to be evaluated on."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from fedlesam.data.dataset import DataSet, Images


def order(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """One fixed shuffle, the same for every seed, whose every beginning has the classes in the whole set's proportions.

    Up to the rounding of counts: the j-th of a class's n samples stands at (j + 1/2) / n of the way.
    """
    draw = np.random.default_rng(0)
    shuffled = draw.permutation(len(labels))
    place = np.empty(len(labels))
    for label in np.unique(labels):
        mine = np.flatnonzero(labels[shuffled] == label)
        place[mine] = (np.arange(len(mine)) + 0.5) / len(mine)
    return np.asarray(shuffled[np.argsort(place, kind="stable")], dtype=np.int64)


def select(data: DataSet, samples: int | None, held_out: int | float | None) -> DataSet:
    """The first `samples` of the fixed order to train on; the last `held_out` of it in the place of the test data.

    Then nobody sees the test data. What is held out, a count or a share, does not depend on `samples`.
    """
    if samples is None and held_out is None:
        return data
    total = len(data.train)
    held = 0 if held_out is None else _count(held_out, total)
    wanted = total - held if samples is None else samples
    if not 1 <= wanted <= total - held:
        beside = f" beside the {held:,} held out" if held else ""
        raise ValueError(
            f"data {data.name}: {wanted:,} training samples were asked for, it has {total - held:,}{beside}; "
            "give fewer --samples"
        )
    chosen = order(data.train.y.numpy())
    return replace(
        data,
        train=_part(data.train, chosen[:wanted]),
        test=data.test if held_out is None else _part(data.train, chosen[total - held :]),
        fingerprint=f"{data.fingerprint} {wanted} of {total}{f', {held} held out' if held else ''}",
    )


def _count(held_out: int | float, total: int) -> int:
    count = held_out if isinstance(held_out, int) else round(held_out * total)
    if not 1 <= count < total:
        raise ValueError(
            f"--held-out {held_out}: expected a count from 1 to {total - 1:,}, or a share between 0 and 1, such as 10%"
        )
    return count


def _part(images: Images, chosen: NDArray[np.int64]) -> Images:
    where = torch.from_numpy(np.sort(chosen))
    return Images(images.x[where], images.y[where])
