"""fedlesam list"""

import json
from typing import Any

import click

from fedlesam.cli.options import json_option


@click.command("list")
@click.argument("what", type=click.Choice(["algorithms", "data", "models", "splits"]))
@json_option
def command(what: str, as_json: bool) -> None:
    """List the algorithms, data sets, models or splits.

    \b
    fedlesam list algorithms    the three slots of every method, and what it costs
    fedlesam list splits        how a data set can be divided over clients
    """
    columns, rows = LISTS[what]()
    if as_json:
        click.echo(json.dumps([dict(zip(columns, row, strict=True)) for row in rows]))
        return
    from fedlesam.cli.show import print_table

    print_table(columns, [[str(cell) for cell in row] for row in rows])
    if what == "data":
        from fedlesam.data.catalogue import FILE_OPTIONS, FILE_SETS, OPTIONS, PATHS

        click.echo("\nWith domains (--split leave-out:DOMAIN) these options can follow, e.g. pacs:size=96,limit=100:")
        for name, meaning in OPTIONS.items():
            click.echo(f"  {name:<7}{meaning}")
        click.echo("\nThese options can follow texts, e.g. shakespeare:stride=1 or texts:PATH,length=64:")
        for name, meaning in FILE_OPTIONS.items():
            users = [known for known in (*FILE_SETS.values(), *PATHS.values()) if name in known.options]
            defaults = ", ".join(f"{known.name} {known.options[name]}" for known in users)
            click.echo(f"  {name:<7}{meaning} [{defaults}]")
    if what == "algorithms":
        click.echo(
            "\npasses: backward passes per local step. down, up: model-sized vectors a client receives and sends"
            "\nper round. stored: those a client holds between rounds, the model included. FedAvg is 1 everywhere."
        )


Listing = tuple[list[str], list[list[Any]]]


def algorithms() -> Listing:
    """The methods of the catalogue."""
    from fedlesam.algorithms import CATALOGUE, example
    from fedlesam.runs import costs

    rows = []
    for name in CATALOGUE:
        algorithm, cost = example(name), costs.measure(example(name))
        slots = [show_rule(rule) for rule in (algorithm.perturbation, algorithm.correction, algorithm.server)]
        rows.append([name, *slots, *(f"{value:g}" for value in (cost.passes, cost.down, cost.up, cost.stored))])
    return ["name", "perturbation", "correction", "server rule", "passes", "down", "up", "stored"], rows


PLAIN = (("lr_g", 1.0), ("scale", 1.0))
"""Factors that do nothing."""


def show_rule(rule: Any) -> str:
    """The rule and its numbers; `repr` has every field by name.

    Args:
        rule: Of any slot.
    """
    name = type(rule).__name__
    if name in ("NoPerturbation", "NoCorrection"):
        return "-"
    numbers = [f"{v:g}" for k, v in vars(rule).items() if isinstance(v, float) and (k, v) not in PLAIN]
    return f"{name}({', '.join(numbers)})" if numbers else name


def models() -> Listing:
    """The networks of the catalogue."""
    import inspect

    from fedlesam.models.catalogue import FROM_DATA, MODELS

    rows = []
    for name, make in MODELS.items():
        options = [str(p) for k, p in inspect.signature(make).parameters.items() if k not in FROM_DATA]
        summary = (inspect.getdoc(make) or "").splitlines()[0]
        rows.append([name, ", ".join(options).replace("'", "") or "-", summary])
    own = ["module:callable", "-", "your own, called with shape and classes"]
    return ["name", "options", "what it is"], [*rows, own]


def splits() -> Listing:
    """The schemes by which samples are divided."""
    from fedlesam.data.splits import SCHEMES

    return ["split", "what it is"], [list(row) for row in SCHEMES.items()]


def data() -> Listing:
    """The data sets of the catalogue."""
    from fedlesam.data.catalogue import NAMES

    return ["name", "what it is"], [list(row) for row in NAMES.items()]


LISTS = {"algorithms": algorithms, "data": data, "models": models, "splits": splits}
