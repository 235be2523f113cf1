"""fedlesam cost"""

import dataclasses
import json

import click

from fedlesam.cli.options import Settings, grouped_command, json_option, settings
from fedlesam.runs import config as configs


@grouped_command(
    "cost",
    "fedlesam cost --algorithm fedlesam-s --model resnet18 --data cifar10 --clients 200 --active 20",
    "fedlesam cost --algorithm fedsmoo --clients 40 --active 4 --workers 2 --memory 100MB --json",
)
@settings()
@json_option
def command(settings: Settings, as_json: bool) -> None:
    """Predict what a run needs, without running it: RAM, GPU memory, disk, bytes per round, backward passes.

    Takes the flags of `fedlesam run`. RAM and GPU memory are without the activations of a forward pass, RAM also
    without the data set. Neither a GPU nor the files of a public data set are needed: where these are not there, the
    published numbers of samples and clients are assumed, all classes and clients of equal size.
    """
    config = configs.resolve(settings())

    from fedlesam.core.space import size
    from fedlesam.runs import costs
    from fedlesam.runs.build import build

    data, real = costs.data_for(config)
    device = "cpu" if (config.device or "").startswith("cuda") else config.device
    predicted = costs.predict(config, build(dataclasses.replace(config, device=device), data).federation)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(predicted)))
        return
    p = predicted
    answer = f", {p.active * (1 - config.dropout):,.3g} answer (--dropout {config.dropout:g})" if config.dropout else ""
    ever = min(p.clients, p.active * config.rounds)
    shared = ", what clients of one round share counted once" if p.client_memory < p.one_client * ever else ""
    kept = f"{size(p.client_memory)} in the end{shared}" if p.client_memory else "nothing"
    in_files = config.workers > 1 and config.store == "shared"
    rest = f"clients' memory{'' if in_files else f' above {size(config.memory)}'} goes to files"
    together = ", with all runs that fill the rows" if config.stack_runs is not None else ""
    rows = [
        ("model", f"{p.parameters:,} parameters"),
        ("clients", f"{p.clients:,}, {p.active:,} active a round{answer}"),
        ("backward passes", f"{p.backward_passes_per_round:,.0f} a round"),
        ("sent to clients", f"{size(p.bytes_down_per_round)} a round"),
        ("sent by clients", f"{size(p.bytes_up_per_round)} a round"),
        ("one client keeps", size(p.one_client) if p.one_client else "nothing"),
        ("all clients keep", kept),
        ("RAM", f"{size(p.ram)}{together}; {rest}"),
        ("GPU", f"{size(p.gpu)} for each worker with --device cuda, without activations"),
        ("disk", f"{size(p.disk)}, and at most {size(p.checkpoints)} for checkpoints"),
    ]
    if not real:
        vocabulary = f"a vocabulary of {data.tokens:,}, " if data.tokens else ""
        assumed = f"its shape, {vocabulary}classes and clients of equal size"
        rows.append(("data", f"{config.data} was not found; assumed: {assumed}"))
    for name, value in rows:
        click.echo(f"{name + ':':<20}{value}")
