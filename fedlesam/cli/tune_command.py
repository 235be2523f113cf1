"""fedlesam tune"""

import dataclasses
import functools
import json
from typing import Any

import click

from fedlesam.cli.options import Output, Settings, count, grouped_command, option, output, settings
from fedlesam.runs import config as configs
from fedlesam.runs.evaluated import HELD_OUT, LAST

SEARCH = "The search"


@grouped_command(
    "tune",
    "fedlesam tune --algorithm fedlesam-s --over rho=0.01,0.05,0.1,0.5 --rounds 50",
    "fedlesam tune --algorithm fedsam --over rho=0.001..1 --over lr=0.03,0.1 --trials 20 --jobs 2",
    "fedlesam run --config runs/tune-x/best.toml     # train on all training data, then look at the test data",
)
@option(
    "--over",
    "space",
    group=SEARCH,
    multiple=True,
    metavar="NAME=VALUES",
    help="values rho=0.01,0.1,1 (all combinations are tried), or a range rho=0.001..1 for --trials; may be repeated",
)
@count("--trials", SEARCH, "draw N trials with Optuna's TPE")
@count("--seeds", SEARCH, "runs per trial", 1)
@count("--jobs", SEARCH, "runs at once", 1)
@settings()
@output
def command(
    space: tuple[str, ...], trials: int | None, seeds: int, jobs: int, settings: Settings, output: Output
) -> int:
    """Search any setting or hyper-parameter, judged on training samples that are held out (--held-out, 10 %).

    The test data is never evaluated on. Repeat the command to resume a search that was interrupted. The best
    settings are written to best.toml, without anything held out: `fedlesam run --config` trains them on all of the
    training data.
    """
    from fedlesam.cli.show import Display, print_table
    from fedlesam.cli.sweep_display import print_failed, watch_sweep
    from fedlesam.runs import tune as tuning
    from fedlesam.runs.sweep import Sweep

    if output.overwrite:
        raise ValueError("tune does not replace anything: choose another --out, or delete the folder")
    base = settings()
    wanted = tuning.parse_space(space)
    drawn = tuning.Optuna(wanted, trials, base.seed, jobs) if trials else None
    points = tuning.grid(wanted) if drawn is None else []
    for values in points[:1]:
        configs.resolve(configs.update(base, values))  # refuses what the method does not take
    display = Display(output.quiet or output.as_json)
    display.print(tuning.budget(base, trials or len(points), seeds))
    out = output.out or tuning.default_folder(base, space, trials, seeds)
    with display.open(out), Sweep(out).open() as sweep:
        begin = functools.partial(watch_sweep, display)
        found = tuning.tune(base, drawn or points, sweep, seeds, jobs, begin)
        failed = {failure["run"]: failure["why"] for failure in sweep.failed.values()}
    best = tuning.write_best(base, found, out)
    if output.as_json:
        lines = [{"values": dict(t.values), "score": t.score and dataclasses.asdict(t.score)} for t in found]
        named = {"measure": "mean_of_last", "metric": found[0].measure.name if found else "accuracy"}
        answer = {"folder": str(out), "evaluated_on": HELD_OUT, **named, "trials": lines}
        click.echo(json.dumps(answer))
    elif not output.quiet:
        rows = [
            [*map(str, t.values.values()), "failed" if t.score is None else _shown(t, t.score.mean), _spread(t)]
            for t in found
        ]
        measure = found[0].measure
        what = f"held-out {measure.title}{measure.unit}, mean of the last {LAST} evaluations"
        print_table([*wanted, what, "±"], rows)
        if best is not None:
            click.echo(f"\nbest settings, nothing held out: {best}")
    return print_failed(failed)


def _spread(trial: Any) -> str:
    return "" if trial.score is None or trial.score.spread is None else _shown(trial, trial.score.spread)


def _shown(trial: Any, value: float) -> str:
    return str(trial.measure.show(value / trial.measure.scale))
