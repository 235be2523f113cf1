"""The networks. Each takes the shape of its inputs, (channels, height, width), and the number of classes.

model = fl.models.cnn((1, 8, 8), classes=10)
model = fl.models.make_model("resnet18:width=16", (3, 32, 32), classes=10, seed=0)
"""

from typing import TYPE_CHECKING

from fedlesam.core.lazy import lazy

if TYPE_CHECKING:
    from fedlesam.models.catalogue import MODELS as MODELS
    from fedlesam.models.catalogue import make_model as make_model
    from fedlesam.models.efficientnet import efficientnet_lite0 as efficientnet_lite0
    from fedlesam.models.resnet import resnet18 as resnet18
    from fedlesam.models.small import cnn as cnn
    from fedlesam.models.small import lenet as lenet
    from fedlesam.models.small import mlp as mlp
    from fedlesam.models.vit import vit_b32 as vit_b32

_HOMES = {
    **dict.fromkeys(("MODELS", "make_model"), "catalogue"),
    **dict.fromkeys(("cnn", "lenet", "mlp"), "small"),
    "efficientnet_lite0": "efficientnet",
    "resnet18": "resnet",
    "vit_b32": "vit",
}
__all__ = [*_HOMES]
__getattr__, __dir__ = lazy(__name__, _HOMES)
