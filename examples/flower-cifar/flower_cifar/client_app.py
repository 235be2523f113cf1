"""The app of a SuperNode."""

from fedlesam.flower import client_app
from flower_cifar.task import client_model, load_client, local_training

app = client_app(client_model, load_client, local_training, threads=1)
