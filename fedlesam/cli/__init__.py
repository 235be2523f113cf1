"""The command line. Every command is imported only when it is called, so that help answers at once."""

import importlib
import os
import sys
import time

import click

COMMANDS = {
    "run": "train one method into a run folder",
    "compare": "train several methods on the same split and rank them",
    "probe": "measure runs: sharpness, curvature, drift, loss surfaces",
    "report": "one page of runs: charts, loss surfaces, costs; figures and tables for a paper",
    "watch": "the same page, live, while runs train",
    "tune": "search hyper-parameters on held-out training data",
    "split": "divide a data set over clients, look at it, save it",
    "data": "fetch data sets, and check those you have",
    "runs": "the runs in a folder: state, accuracy, time left",
    "cost": "what a run will need: RAM, disk, traffic, backward passes",
    "deploy": "a Flower app on this machine with one command; keys, and what is insecure or missing",
    "explain": "a method: its equations, what it sends and keeps, its papers",
    "list": "the algorithms, data sets, models and splits there are",
    "demo": "five methods on the embedded data in a minute, with pictures",
}

FAILED, BAD_INPUT, NOT_FINITE, LOST, INTERRUPTED = 1, 2, 3, 4, 130
"""Exit codes; a signal that stopped a run has its own, 128 and its number."""


LEADER_FIRST = 3.0
"""Seconds: torchrun ends all processes of a host with the first, and the leader has a summary to write."""


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"fedlesam.cli.{name}_command").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        from fedlesam.core.names import unknown

        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(str(unknown("command", args[0], COMMANDS)), ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="fedlesam")
def cli() -> None:
    """Federated learning methods for PyTorch: exact, composable, resumable, with the flatness of their minima measured.

    \b
    A first look:        fedlesam demo
    One method:          fedlesam run --algorithm fedlesam-s --rounds 50
    Several, ranked:     fedlesam compare fedavg fedsam fedlesam --seeds 3
    Look at them:        fedlesam report runs/x --out report.html
    What there is:       fedlesam list algorithms

    Completion in bash (zsh, fish): eval "$(_FEDLESAM_COMPLETE=bash_source fedlesam)"

    Repeat a command to resume an interrupted run at its last checkpoint.

    Exit codes: 0 done, 1 some runs of several failed, 2 bad input, 3 the numbers stopped being finite or no client ever
    answered, 4 a worker died or was lost, 130 interrupted (Ctrl-C), 143 terminated (SIGTERM).
    """


def main(command: click.Command = cli) -> None:
    """Errors a user can mend are one line, not a traceback; FEDLESAM_TRACEBACK=1 shows it all the same.

    Args:
        command: What is run with the arguments of this process.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # PyTorch's: large tensors in huge pages
    try:
        sys.exit(command.main(standalone_mode=False) or 0)
    except click.ClickException as error:
        if _leads():
            error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt) as error:
        click.echo(str(error.__cause__ or error) or "interrupted", err=True)
        signum = getattr(error.__cause__ or error, "signum", None)
        sys.exit(128 + signum if signum else INTERRUPTED)
    except BrokenPipeError:
        os._exit(0)
    except (ValueError, ArithmeticError, OSError, RuntimeError) as error:
        if os.environ.get("FEDLESAM_TRACEBACK"):
            raise
        from fedlesam.engines.world import WorkerLost

        if isinstance(error, RuntimeError) and not isinstance(error, WorkerLost):
            raise

        if _leads() or (isinstance(error, WorkerLost) and os.environ.get("LOCAL_RANK") == "0"):
            click.secho("error: ", fg="red", bold=True, nl=False, err=True)
            click.echo(str(error), err=True)
        numbers, lost = isinstance(error, ArithmeticError), isinstance(error, WorkerLost)
        if lost and not _leads():
            time.sleep(LEADER_FIRST)
        sys.exit(NOT_FINITE if numbers else LOST if lost else BAD_INPUT)


def _leads() -> bool:
    """Of the processes that torchrun starts, the first prints for all: the others send it their errors."""
    return os.environ.get("RANK", "0") == "0"
