"""The flags of `run`, `compare` and `split`, made from the table of settings, and help in groups."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from fedlesam.runs import config as configs
from fedlesam.runs.config import HYPER, KINDS, OPTIONS, Option, RunConfig, Value

OUTPUT = "Output"
LIVE = "Live trackers"


class Grouped(click.Option):
    """A flag that belongs to a group of the help."""

    def __init__(self, *args: Any, group: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class GroupedCommand(click.Command):
    """Help in groups, examples last where they are seen."""

    def __init__(self, *args: Any, examples: Iterable[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
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


class Setting(click.ParamType[Value]):
    """A setting's text, parsed by its own rule."""

    def __init__(self, key: str, option: Option) -> None:
        self.key, self.option = key, option
        self.name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Value:
        return configs.parse(self.key, value, f"--{self.key.replace('_', '-')}") if isinstance(value, str) else value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        return [
            click.shell_completion.CompletionItem(name) for name in names_of(self.key) if name.startswith(incomplete)
        ]


def names_of(key: str) -> list[str]:
    """What a flag can be completed to."""
    if key == "algorithm":
        from fedlesam.algorithms import CATALOGUE

        return list(CATALOGUE)
    if key == "model":
        from fedlesam.models.catalogue import MODELS

        return list(MODELS)
    if key == "data":
        from fedlesam.data.catalogue import NAMES

        return [name.removesuffix("PATH") for name in NAMES]
    known = {
        "split": ["iid", "pooled", "dirichlet:", "dirichlet-by-class:", "pathological:", "leave-out:", "by:", "file:"],
        "clip_scope": ["loss", "corrected"],
        "engine": ["plain", "stacked"],
        "precision": ["fp32", "bf16"],
        "store": ["shared", "pinned"],
        "device": ["auto", "cpu", "cuda"],
        "weighting": ["clients", "examples"],
        "on_client_error": ["drop", "stop"],
    }
    return known.get(key, [])


def setting(key: str, option: Option, default: Value | None) -> Callable[[Any], Any]:
    shown = "" if default is None or isinstance(default, bool) else f"  [{default}]"
    if KINDS[option.kind][1] == (bool,):
        flag = key.replace("_", "-")
        names = f"--{flag}/--no-{flag}"
        return click.option(names, key, cls=Grouped, group=option.group, default=None, help=option.help + shown)
    if key == "probe":
        return click.option(
            "--probe",
            key,
            cls=Grouped,
            group=option.group,
            multiple=True,
            metavar="NAME[:KEY=VALUE,...]",
            callback=lambda ctx, param, words: " ".join(words) or None,
            help=option.help,
        )
    metavar = option.metavar or ("NAME" if KINDS[option.kind][1] == (str,) else "N")
    return click.option(
        f"--{key.replace('_', '-')}",
        key,
        cls=Grouped,
        group=option.group,
        type=Setting(key, option),
        metavar=metavar,
        help=option.help + shown,
    )


def settings(*, without: Iterable[str] = (), only: Iterable[str] | None = None) -> Callable[[Any], Any]:
    """All settings as flags, in the order of the table, `--config` and `--set` with them."""
    wanted = [name for name in OPTIONS if name not in without and (only is None or name in only)]

    def decorate(function: Any) -> Any:
        if only is None:
            function = click.option(
                "--set",
                "assignments",
                cls=Grouped,
                group=configs.METHOD,
                multiple=True,
                metavar="NAME=VALUE",
                help="any setting, or any hyper-parameter of the method; may be repeated",
            )(function)
            for name, option in reversed(HYPER.items()):
                function = setting(name, option, None)(function)
        for name in reversed(wanted):
            function = setting(name, OPTIONS[name], getattr(RunConfig(), name))(function)
        return click.option(
            "--config",
            "config_file",
            cls=Grouped,
            group=configs.WHAT,
            type=click.Path(path_type=Path, exists=True, dir_okay=False),
            metavar="FILE",
            help="settings from a TOML file; flags win",
        )(function)

    return decorate


def output(function: Any) -> Any:
    """Where results go and how much is said."""
    for names, keywords in reversed(
        [
            (("--out",), {"type": click.Path(path_type=Path), "metavar": "DIR", "help": "the folder for the results"}),
            (("--overwrite",), {"is_flag": True, "help": "start anew, and replace what that folder holds"}),
            (("--quiet", "-q"), {"is_flag": True, "help": "no progress and no table"}),
            (("--json", "as_json"), {"is_flag": True, "help": "print the result as JSON, for scripts"}),
        ]
    ):
        function = click.option(*names, cls=Grouped, group=OUTPUT, **keywords)(function)
    return function


def trackers(function: Any) -> Any:
    """Who else watches the rounds."""
    flags: list[tuple[str, dict[str, Any]]] = [
        (
            "--tensorboard",
            {
                "is_flag": False,
                "flag_value": "",
                "metavar": "[DIR]",
                "help": "event files in DIR, or in the run's folder (pip install 'fedlesam[tensorboard]')",
            },
        ),
        ("--mlflow", {"metavar": "URI", "help": "to an MLflow server (pip install 'fedlesam[mlflow]')"}),
        (
            "--wandb",
            {
                "is_flag": True,
                "help": "to Weights & Biases; WANDB_MODE=offline needs no account (pip install 'fedlesam[wandb]')",
            },
        ),
    ]
    for name, keywords in reversed(flags):
        function = click.option(name, cls=Grouped, group=LIVE, **keywords)(function)
    return function


def build_config(config_file: Path | None, assignments: Iterable[str], flags: dict[str, Value | None]) -> RunConfig:
    """File, then flags, then `--set`; what comes later wins."""
    config = RunConfig()
    if config_file is not None:
        config = configs.update(config, configs.read(config_file))
    config = configs.update(config, flags)
    pairs: dict[str, Value | None] = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"--set {text}: expected NAME=VALUE, e.g. --set rho=0.05")
        pairs[name.replace("-", "_")] = configs.parse(name.replace("-", "_"), value, f"--set {name}")
    return configs.update(config, pairs)
