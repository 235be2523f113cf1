"""Flower: a ClientApp and a ServerApp with its FedAvg in its simulation, by default an actor for each of two cores."""

from collections.abc import Iterable

import torch
import work
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(work.job().flower_cpus)
    config = message.content["config"]
    model = work.make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loss = work.train(model, int(config["server-round"]) - 1, int(config["client"]))
    metrics = MetricRecord({"train_loss": loss, "num-examples": work.data()[0].shape[1]})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


class Scheduled(FedAvg):
    """Flower's FedAvg, but each message says whose samples to train on, so that all systems train the same clients."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = list(super().configure_train(server_round, arrays, config, grid))
        for message, client in zip(messages, work.active()[server_round - 1], strict=True):
            told = ConfigRecord({"server-round": server_round, "client": client})
            yield Message(
                content=RecordDict({"arrays": arrays, "config": told}),
                message_type=MessageType.TRAIN,
                dst_node_id=message.metadata.dst_node_id,
            )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        result = super().aggregate_train(server_round, replies)
        work.mark()
        return result


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    strategy = Scheduled(
        fraction_train=work.ACTIVE / work.CLIENTS,
        fraction_evaluate=0.0,
        min_train_nodes=work.ACTIVE,  # the fraction is of the nodes that are there by now, which may be fewer
        min_available_nodes=work.CLIENTS,
    )
    model = work.first_model()
    work.mark()
    result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=work.job().rounds)
    model.load_state_dict(result.arrays.to_torch_state_dict())
    work.finish(work.flat(model), "flwr", "ray")


def main() -> None:
    backend = {
        "client_resources": {"num_cpus": work.job().flower_cpus, "num_gpus": 0.0},
        "init_args": {"num_cpus": work.WORKERS, "num_gpus": 0},
    }
    run_simulation(server_app, client_app, num_supernodes=work.CLIENTS, backend_config=backend)


if __name__ == "__main__":
    main()
