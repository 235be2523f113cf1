from fedlesam.models.catalogue import MODELS as MODELS
from fedlesam.models.catalogue import make_model as make_model
from fedlesam.models.efficientnet import efficientnet_lite0 as efficientnet_lite0
from fedlesam.models.resnet import resnet18 as resnet18
from fedlesam.models.small import cnn as cnn
from fedlesam.models.small import lenet as lenet
from fedlesam.models.small import mlp as mlp
from fedlesam.models.vit import vit_b32 as vit_b32
