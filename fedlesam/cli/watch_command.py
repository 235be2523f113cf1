"""fedlesam watch"""

from contextlib import suppress
from pathlib import Path

import click

from fedlesam.cli.options import grouped_command, option
from fedlesam.cli.report_command import target


@grouped_command("watch", "fedlesam watch runs/x", "fedlesam watch runs/comparison --port 8700")
@click.argument("folders", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@option(
    "--target", "targets", type=target, multiple=True, metavar="VALUE", help="also give the cost to reach this value"
)
@option("--port", type=click.IntRange(1, 65535), help="the server's port  [8610, or a free one]")
@option("--open", "opens", is_flag=True, help="also open the page in the browser")
def command(folders: tuple[Path, ...], targets: tuple[float, ...], port: int | None, opens: bool) -> None:
    """Show the page of `fedlesam report` while runs train, from a small server on this machine. Ctrl-C stops it.

    RUN is a run folder, or a folder of run folders that `compare`, `tune` or a sweep fills. The page renews itself when
    there is something new. The server listens on 127.0.0.1 only, reads the folders and changes nothing.
    """
    from fedlesam.report.watch import LivePage, Server

    with Server(LivePage(folders, targets), port) as server, suppress(KeyboardInterrupt):
        click.echo(f"{server.address}  (Ctrl-C stops)")
        for folder in folders:
            if not folder.exists():
                click.echo(f"{folder}: does not exist yet; its runs are shown as soon as there are some")
        if opens:
            click.launch(server.address)
        server.serve_forever()
    click.echo("stopped")
