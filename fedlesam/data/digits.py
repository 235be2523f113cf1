"""The embedded data set: 1,797 handwritten digits, 8 x 8 pixels of 0 to 16.

The test part of the UCI Optical Recognition of Handwritten Digits data set (E. Alpaydin, C. Kaynak, 1998, CC BY 4.0),
as scikit-learn distributes it.
"""

from importlib import resources

import numpy as np
import torch

from fedlesam.data.dataset import DataSet, Images

TRAINING = 1437
"""Four fifths; the rest is the test set. One fixed shuffle parts them, the same for every seed."""


def load_digits() -> DataSet:
    with resources.files("fedlesam.data").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        x = torch.from_numpy(arrays["images"]).unsqueeze(1)
        y = torch.from_numpy(arrays["labels"].astype(np.int64))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[:TRAINING], order[TRAINING:]
    return DataSet(
        name="digits",
        train=Images(x[train], y[train]),
        test=Images(x[test], y[test]),
        classes=tuple("0123456789"),
        mean=(0.305,),
        std=(0.376,),
        scale=16.0,
        fingerprint="digits-1797",
    )
