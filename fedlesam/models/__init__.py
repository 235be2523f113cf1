"""The networks. Each takes the shape of its inputs, (channels, height, width), and the number of classes; of texts also
the size of the vocabulary.

model = fl.models.cnn((1, 8, 8), classes=10)
model = fl.models.make_model("resnet18:width=16", (3, 32, 32), classes=10, seed=0)
"""

from fedlesam.core.lazy import lazy

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
