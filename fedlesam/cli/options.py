"""The flags of `run`, `compare` and `split`, made from the table of settings, and help in groups."""

import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from fedlesam.runs import config as configs
from fedlesam.runs import config_file as toml_file
from fedlesam.runs.config import HYPER, OPTIONS, RunConfig
from fedlesam.runs.kinds import KINDS, Option, Value

OUTPUT = "Output"
LIVE = "Live trackers"
PROBE = "NAME[:KEY=VALUE,...]"
NAMED = {
    "algorithm": "fedlesam.algorithms.CATALOGUE",
    "model": "fedlesam.models.catalogue.MODELS",
    "data": "fedlesam.data.catalogue.NAMES",
    "split": "fedlesam.data.splits.SCHEMES",
}
"""Settings that are names, and where those are."""
SHORTER = {"keep_last": [" /--no-keep"]}
"""More names of switches."""


Settings = Callable[[], RunConfig]
"""Reads the settings that were given, or refuses them."""


class Grouped(click.Option):
    """A flag that belongs to a group of the help.

    Args:
        args: As `click.Option` takes them.
        group: The heading under which the flag stands.
        kwargs: As `click.Option` takes them.
    """

    def __init__(self, *args: Any, group: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class GroupedCommand(click.Command):
    """Help in groups, examples last where they are seen.

    Args:
        args: As `click.Command` takes them.
        examples: Command lines for the end of the help.
        kwargs: As `click.Command` takes them.
    """

    def __init__(self, *args: Any, examples: Iterable[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.context_settings.setdefault("help_option_names", ["-h", "--help"])
        self.examples = list(examples)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row is not None and isinstance(parameter, click.Option):
                groups.setdefault(getattr(parameter, "group", "Other"), []).append(row)
        for name, rows in groups.items():
            with formatter.section(name):
                formatter.write_dl(rows)
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"{'':{formatter.current_indent}}{example}\n")


def grouped_command(name: str, *examples: str) -> Callable[[Callable[..., Any]], GroupedCommand]:
    """`click.command` with help in groups.

    Args:
        name: Of the command.
        examples: Command lines for the end of its help.
    """
    return click.command(name, cls=GroupedCommand, examples=examples)


def option(*names: str, group: str = OUTPUT, **keywords: Any) -> Callable[[Any], Any]:
    """`click.option` in a group of the help.

    Args:
        group: The heading under which the flag stands.
        names: As `click.option` takes them.
        keywords: As `click.option` takes them.
    """
    return click.option(*names, cls=Grouped, group=group, **keywords)


def folder(name: str, help: str) -> Callable[[Any], Any]:
    """An option that names a folder for results.

    Args:
        name: Of the flag.
        help: What the folder is for.
    """
    return option(name, type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help=help)


def file(name: str, help: str, metavar: str = "FILE", default: Path | None = None) -> Callable[[Any], Any]:
    """An option that names a file for results.

    Args:
        name: Of the flag.
        help: What the file is for.
        metavar: What stands for the file in the help.
        default: The file without the flag; None for none.
    """
    kind = click.Path(path_type=Path, dir_okay=False)
    return option(name, type=kind, default=default, metavar=metavar, help=help)


def count(name: str, group: str, help: str, default: int | None = None) -> Callable[[Any], Any]:
    """An option that is a whole number from 1.

    Args:
        name: Of the flag.
        group: The heading under which it stands.
        help: What is counted.
        default: The number without the flag; None for none.
    """
    shown = f"{help}  [{default}]" if default is not None else help
    return option(name, group=group, type=click.IntRange(1), default=default, metavar="N", help=shown)


quiet_option = option("--quiet", "-q", is_flag=True, help="no progress and no table")
json_option = option("--json", "as_json", is_flag=True, help="print the result as JSON, for scripts")


class Setting(click.ParamType[Value]):
    """A setting's text, parsed by its own rule.

    Args:
        key: The setting's name.
    """

    name = "text"

    def __init__(self, key: str) -> None:
        self.key = key

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Value:
        return configs.parse(self.key, value, f"--{self.key.replace('_', '-')}") if isinstance(value, str) else value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        item = click.shell_completion.CompletionItem
        return [item(name) for name in names_of(self.key) if name.startswith(incomplete)]


def names_of(key: str) -> list[str]:
    """What a flag can be completed to.

    Args:
        key: The setting's name.
    """
    if key == "device":
        return ["auto", "cpu", "cuda"]
    if key not in NAMED:
        return list(OPTIONS[key].choices) if key in OPTIONS else []
    module, _, name = NAMED[key].rpartition(".")
    names = [name for name in getattr(importlib.import_module(module), name) if name.upper() != "MODULE:CALLABLE"]
    return [f"{name.partition(':')[0]}:" if ":" in name else name for name in names]


def setting(key: str, known: Option, default: Value | None) -> Callable[[Any], Any]:
    """The flag of a setting or hyper-parameter.

    Args:
        key: The setting's name.
        known: Its group, help and choices.
        default: As the help shows it; None for none.
    """
    flag, shown = key.replace("_", "-"), "" if default is None or isinstance(default, bool) else f"  [{default}]"
    if KINDS[known.kind][1] == (bool,):
        names = [f"--{flag}/--no-{flag}", *SHORTER.get(key, ())]
        return option(*names, key, group=known.group, default=None, help=known.help)
    if key in ("probe", "metric"):
        join = {"multiple": True, "callback": lambda ctx, param, words: " ".join(words) or None}
        metavar = PROBE if key == "probe" else "NAME"
        return option(f"--{key}", key, group=known.group, metavar=metavar, help=known.help, **join)
    choices = f"[{'|'.join(known.choices)}]" if known.choices else ""
    metavar = known.metavar or choices or ("NAME" if KINDS[known.kind][1] == (str,) else "N")
    return option(f"--{flag}", key, group=known.group, type=Setting(key), metavar=metavar, help=known.help + shown)


def settings(*, without: Iterable[str] = (), only: Iterable[str] | None = None) -> Callable[[Any], Any]:
    """All settings as flags, in the order of the table, `--config` and `--set` with them.

    Args:
        without: Settings that get no flag.
        only: The settings that get one, if not all; then there is no `--set`.
    """
    flags = [
        option(
            "--config",
            "config_file",
            group=configs.WHAT,
            type=click.Path(path_type=Path, exists=True, dir_okay=False),
            metavar="FILE",
            help="settings from a TOML file; flags override them",
        )
    ]
    for name, known in OPTIONS.items():
        if name not in without and (only is None or name in only):
            flags.append(setting(name, known, getattr(RunConfig(), name)))
    if only is None:
        flags += [setting(name, known, None) for name, known in HYPER.items()]
        help = "any setting, or any hyper-parameter of the method; may be repeated"
        flags.append(
            option("--set", "assignments", group=configs.METHOD, multiple=True, metavar="NAME=VALUE", help=help)
        )
    return together(*flags, name="settings", make=_settings)


def _settings(config_file: Path | None, assignments: tuple[str, ...] = (), **flags: Value | None) -> Settings:
    return functools.partial(build_config, config_file, assignments, flags)


def together(*flags: Callable[[Any], Any], name: str, make: Callable[..., Any]) -> Callable[[Any], Any]:
    """Several options as one decorator, in their order, and as one argument of the command.

    Args:
        *flags: The options.
        name: The argument.
        make: Makes its value from those of the options.
    """

    def decorate(function: Any) -> Any:
        before = len(getattr(function, "__click_params__", ()))

        @functools.wraps(function)
        def command(**values: Any) -> Any:
            own = {key: values.pop(key) for key in names}
            return function(**values, **{name: make(**own)})

        for flag in reversed(flags):
            command = flag(command)
        names = [param.name for param in vars(command)["__click_params__"][before:]]
        return command

    return decorate


@dataclass(frozen=True)
class Output:
    """Where results go and how much is printed."""

    out: Path | None
    """The folder for results; None for one that the command chooses."""
    overwrite: bool = False
    """Whether a run that is there is trained anew."""
    quiet: bool = False
    """Whether nothing but errors is printed."""
    as_json: bool = False
    """Whether results are printed as JSON."""


output = together(
    option("--out", type=click.Path(path_type=Path), metavar="DIR", help="the folder for the results"),
    option("--overwrite", is_flag=True, help="start again, and replace what that folder holds"),
    quiet_option,
    json_option,
    name="output",
    make=Output,
)

trackers = together(
    option(
        "--tensorboard",
        group=LIVE,
        is_flag=False,
        flag_value="",
        metavar="[DIR]",
        help="write event files to DIR, or to the run's folder (pip install 'fedlesam[tensorboard]')",
    ),
    option("--mlflow", group=LIVE, metavar="URI", help="log to an MLflow server (pip install 'fedlesam[mlflow]')"),
    option(
        "--wandb",
        group=LIVE,
        is_flag=True,
        help="log to Weights & Biases; WANDB_MODE=offline needs no account (pip install 'fedlesam[wandb]')",
    ),
    name="trackers",
    make=dict,
)
"""Which trackers see the rounds."""


def build_config(config_file: Path | None, assignments: Iterable[str], flags: dict[str, Value | None]) -> RunConfig:
    """File, then flags, then `--set`; what comes later wins.

    Args:
        config_file: Settings in TOML; None for none.
        assignments: Of `--set`, each as name=value.
        flags: By the settings' names; None for one that was not given.
    """
    config = RunConfig()
    if config_file is not None:
        config = configs.update(config, toml_file.read(config_file))
    config = configs.update(config, flags)
    pairs: dict[str, Value | None] = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"--set {text}: expected NAME=VALUE, e.g. --set rho=0.05")
        pairs[name.replace("-", "_")] = configs.parse(name.replace("-", "_"), value, f"--set {name}")
    return configs.update(config, pairs)
