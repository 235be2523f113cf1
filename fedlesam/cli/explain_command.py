"""fedlesam explain"""

import dataclasses
import json

import click

from fedlesam.cli.options import Setting, grouped_command, json_option, option


@grouped_command("explain", "fedlesam explain fedgloss", "fedlesam explain fedlesam-s --latex")
@click.argument("method", type=Setting("algorithm"))
@option("--latex", is_flag=True, help="print the equations as LaTeX")
@json_option
def command(method: str, latex: bool, as_json: bool) -> None:
    """Explain a method: its equations, parameters and defaults, what a client sends and keeps, its papers.

    METHOD is a name of `fedlesam list algorithms`, or module:callable.
    """
    from fedlesam.runs.explain import explain

    found = explain(method)
    if as_json:
        shown = {
            "name": found.name,
            "parameters": found.parameters,
            "equations": found.equations._asdict(),
            "latex": found.equations.latex(),
            "cost": dataclasses.asdict(found.cost),
            "rules": {slot: {"rule": rule, "about": doc} for slot, (rule, doc) in found.rules.items()},
        }
        click.echo(json.dumps(shown))
    else:
        click.echo(found.text(latex))
