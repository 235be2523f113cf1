"""Where the time of a FedAvg round goes, by operation.

python benchmarks/profile_round.py [--model cnn]
"""

import argparse

import torch
from torch.profiler import ProfilerActivity, profile

import fedlesam as fl
from fedlesam.models.catalogue import make_model


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--model", default="cnn")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(500, 3, 32, 32, generator=draw), torch.randint(0, 10, (500,), generator=draw)
    local = fl.LocalTraining(epochs=1, batch_size=50)
    fed = fl.Federation(
        make_model(options.model, (3, 32, 32), 10, 0), [(x, y)] * 2, "fedavg", local, execution=fl.Execution(threads=1)
    )
    fed.round()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        fed.round()
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=14, max_name_column_width=40))


main()
