"""fedlesam deploy"""

import json
import tempfile
from pathlib import Path

import click

from fedlesam.cli.options import GroupedCommand, json_option, option

COLOURS = {"ok": "green", "note": "cyan", "missing": "yellow", "insecure": "red"}
APP = click.Path(path_type=Path, file_okay=False, exists=True)
PORT = click.IntRange(1, 65535)


@click.group("deploy", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """The same methods on real machines, with Flower.

    \b
    On this machine first:      fedlesam deploy try
    Certificates and keys:      fedlesam deploy keys --out keys --host superlink.example.org --nodes 3
    What is insecure, missing:  fedlesam deploy check my-app
    """


def _need_flower() -> None:
    try:
        import flwr  # noqa: F401
    except ModuleNotFoundError:
        raise ValueError("Flower is not installed: pip install 'fedlesam[flower]'") from None


@command.command(
    "try",
    cls=GroupedCommand,
    short_help="run a Flower app on this machine with one command",
    examples=(
        "fedlesam deploy try",
        "fedlesam deploy try my-app",
        "fedlesam deploy try my-app --nodes 5 --rounds 10 --run-config 'algorithm=\"fedsmoo\"'",
    ),
)
@click.argument("app", type=APP, required=False)
@option(
    "--nodes", type=click.IntRange(1, 64), group="The run", help="SuperNodes, one for each client  [the app's, or 3]"
)
@option("--rounds", type=click.IntRange(1), group="The run", help="number of rounds  [the app's own]")
@option("--run-config", default="", metavar="'K=V ...'", group="The run", help="settings, as `flwr run` takes them")
@option("--node-config", default="", metavar="'K=V ...'", group="The run", help="settings that every node gets")
@option("--keep", is_flag=True, help="keep the logs; after a failure they are always kept")
@option("--flower-executor", is_flag=True, help="a new process for each message, as Flower does by default; slower")
def try_command(
    app: Path | None,
    nodes: int | None,
    rounds: int | None,
    run_config: str,
    node_config: str,
    keep: bool,
    flower_executor: bool,
) -> None:
    """Run a Flower app on this machine: SuperLink, SuperNodes and the run, with one command.

    Everything listens on 127.0.0.1 only, with TLS and SuperNodes that prove who they are by keys made for this run. At
    the end, on Ctrl-C, and when a process dies, all processes are stopped and the keys deleted.

    APP is the folder of a Flower app whose parts are fedlesam.flower's Strategy and client_app. --nodes and --rounds
    set `clients` and `rounds` (or `num-server-rounds`) of its pyproject.toml for this run. Without APP a small one on
    the embedded digits is run.
    """
    _need_flower()
    from fedlesam.flower.app import read_app
    from fedlesam.flower.trial import RunFailed, Trial

    with tempfile.TemporaryDirectory(prefix="fedlesam-app-") as sample:
        if app is None:
            from fedlesam.flower.sample import write_sample

            app = Path(sample)
            write_sample(app)
        trial = Trial(read_app(app), click.echo, nodes, rounds, run_config, node_config, not flower_executor, keep)
        try:
            trial.run()
        except RunFailed as error:
            raise click.ClickException(str(error)) from error


@command.command(
    "keys",
    cls=GroupedCommand,
    short_help="make the certificates and keys of a SuperLink and its SuperNodes",
    examples=("fedlesam deploy keys --out ~/fedlesam-keys --host superlink.example.org --nodes 3",),
)
@option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, metavar="DIR", help="a new folder")
@option("--host", "hosts", multiple=True, metavar="NAME", help="a name or address of the SuperLink; repeatable")
@option("--nodes", type=click.IntRange(0), default=3, show_default=True, help="number of SuperNodes")
@option("--days", type=click.IntRange(1), default=365, show_default=True, help="how long the certificates are valid")
def keys_command(out: Path, hosts: tuple[str, ...], nodes: int, days: int) -> None:
    """Make the certificates and keys for TLS and SuperNode authentication.

    Makes a certificate authority (ca.crt, ca.key), the SuperLink's certificate (server.crt, server.key) for the given
    names, 127.0.0.1 and localhost, and a key pair for every SuperNode (node0, node0.pub, ...). ca.key can sign more
    certificates: copy it to no other machine.
    """
    _need_flower()
    from fedlesam.flower.keys import make_keys

    make_keys(out, hosts, nodes, days)
    click.echo(f"made in {out}: ca, server, and the keys of {nodes} SuperNodes; they expire in {days} days")


@command.command(
    "executor",
    cls=GroupedCommand,
    short_help="train a SuperNode's messages, with PyTorch loaded once",
    examples=("fedlesam deploy executor --port 9094",),
)
@option("--port", "ports", type=PORT, multiple=True, default=[9094], help="the SuperNode's port; repeatable  [9094]")
@option("--preload", multiple=True, metavar="MODULE", help="another module to import once; repeatable")
def executor_command(ports: tuple[int, ...], preload: tuple[str, ...]) -> None:
    """Train a SuperNode's messages without importing PyTorch for each of them.

    Flower starts a new Python process for every message. This command imports PyTorch once, and forks a process for
    every message. It needs a SuperNode on the same machine that was started with `--isolation process`, and ends a
    minute after that SuperNode.
    """
    _need_flower()
    from fedlesam.flower.executor import run_executor

    run_executor(ports, preload)


@command.command(
    "check",
    cls=GroupedCommand,
    short_help="print what is insecure or missing",
    examples=("fedlesam deploy check my-app", "fedlesam deploy check my-app --superlink production"),
)
@click.argument("app", type=APP)
@click.option("--superlink", metavar="NAME", help="a connection of Flower's config.toml  [its default]")
@json_option
def check_command(app: Path, superlink: str | None, as_json: bool) -> int:
    """Check an app's settings, its connection and its SuperLink, and print what is insecure or missing.

    If anything is, the exit code is 1. The number of connected SuperNodes is compared with the app's `clients`. To see
    whether the SuperLink accepts any SuperNode, the command tries to register one with a new key; if that succeeds, it
    is removed at once.
    """
    _need_flower()
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
