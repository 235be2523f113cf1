"""FedLab: its server and two client processes that hold ten clients each, as its cluster simulation has it."""

import os
import subprocess
import sys

import torch
import work

# torchvision, which FedLab imports for its own data sets, does not load beside a torch of another build without this.
_library = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer  # noqa: E402
from fedlab.contrib.algorithm.basic_server import SyncServerHandler  # noqa: E402
from fedlab.core.client.manager import PassiveClientManager  # noqa: E402
from fedlab.core.network import DistNetwork  # noqa: E402
from fedlab.core.server.manager import SynchronousServerManager  # noqa: E402
from torch import Tensor  # noqa: E402


class Handler(SyncServerHandler):
    """FedLab's own; the package also says which round it is, so that all systems take the same batches."""

    @property
    def downlink_package(self) -> list[Tensor]:
        return [self.model_parameters, torch.tensor([float(self.round)])]

    def sample_clients(self) -> list[int]:
        return work.active()[self.round]

    def global_update(self, buffer: list[list[Tensor]]) -> None:
        super().global_update(buffer)
        work.mark()


class Trainer(SGDSerialClientTrainer):
    """FedLab's own, with weight decay and clipping."""

    def local_process(self, payload: list[Tensor], id_list: list[int]) -> None:
        for client in id_list:
            self.set_model(payload[0])
            work.train(self._model, int(payload[1]), client)
            self.cache.append([self.model_parameters])


def main() -> None:
    port = os.environ["PEERS_PORT"]
    rank = int(os.environ.get("PEERS_RANK", "0"))
    network = DistNetwork(address=("127.0.0.1", port), world_size=1 + work.WORKERS, rank=rank)
    if rank > 0:
        trainer = Trainer(work.first_model(), num_clients=work.CLIENTS // work.WORKERS)
        PassiveClientManager(network, trainer).run()
        return
    others = [
        subprocess.Popen([sys.executable, __file__], env={**os.environ, "PEERS_RANK": str(other)})
        for other in range(1, 1 + work.WORKERS)
    ]
    handler = Handler(work.first_model(), work.job().rounds, work.ACTIVE / work.CLIENTS)
    work.mark()
    SynchronousServerManager(network, handler, mode="GLOBAL").run()
    for other in others:
        other.wait()
    work.finish(handler.model_parameters, "fedlab")


if __name__ == "__main__":
    main()
