"""fedlesam deploy"""

import json
from pathlib import Path

import click

from fedlesam.cli.options import GroupedCommand, json_option

COLOURS = {"ok": "green", "note": "cyan", "missing": "yellow", "insecure": "red"}


@click.group("deploy")
def command() -> None:
    """The same methods on real machines, with Flower."""


@command.command(
    "check",
    cls=GroupedCommand,
    examples=("fedlesam deploy check my-app", "fedlesam deploy check my-app --superlink production"),
)
@click.argument("app", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("--superlink", metavar="NAME", help="a connection of Flower's config.toml  [its default]")
@json_option
def check_command(app: Path, superlink: str | None, as_json: bool) -> int:
    """Look at an app's settings, its connection and the SuperLink behind it, and say what is insecure or missing.

    Exit code 1 if something is. To see whether the SuperLink accepts any SuperNode, one with a new key asks to be
    registered; if it is, it is taken back at once.
    """
    try:
        import flwr  # noqa: F401
    except ModuleNotFoundError:
        raise ValueError("Flower is not installed: pip install 'fedlesam[flower]'") from None
    from fedlesam.flower.check import check

    findings = list(check(app, superlink))
    bad = [finding for finding in findings if finding.level in ("missing", "insecure")]
    if as_json:
        click.echo(json.dumps([{"level": finding.level, "text": finding.text} for finding in findings]))
        return int(bool(bad))
    for finding in findings:
        click.echo(f"{click.style(f'{finding.level:<9}', fg=COLOURS[finding.level])} {finding.text}")
    click.echo(f"\n{len(bad)} to mend" if bad else "\nnothing to mend")
    return int(bool(bad))
