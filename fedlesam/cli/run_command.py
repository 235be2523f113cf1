"""fedlesam run"""

import json
from typing import Any

import click

from fedlesam.cli.options import Output, Settings, grouped_command, output, settings, trackers
from fedlesam.runs.evaluated import evaluated_on


@grouped_command(
    "run",
    "fedlesam run --algorithm fedlesam-s --rounds 50",
    "fedlesam run --algorithm fedsam --rho 0.05 --split pathological:3 --clients 20 --active 25% --out runs/x",
    "fedlesam run --config runs/x/config.toml --out runs/y     # the same run again",
    "fedlesam run --algorithm my_rule:my_method --model my_model:Net --set kappa=0.3",
)
@settings()
@trackers
@output
def command(settings: Settings, trackers: dict[str, Any], output: Output) -> None:
    """Train one method and write a run folder.

    The folder holds config.toml (every setting, resolved), metrics.jsonl (a line a round), model.safetensors,
    split.safetensors, summary.json and versions.json. Repeat the command to resume a run that was interrupted or
    killed, from its last checkpoint (--checkpoint-every); the results are the same to the bit. For a finished run it
    only prints the results.
    """
    from fedlesam.cli.show import Display, print_scores
    from fedlesam.engines.world import from_environment
    from fedlesam.runs.folder import RunFolder
    from fedlesam.runs.runner import execute, notes, release_workers_on_error, run_worker, settle
    from fedlesam.runs.trackers import wanted, watching

    world = from_environment()
    if world is not None and world.rank != 0:
        run_worker(world)
        return
    with release_workers_on_error(world):
        openers = wanted(**trackers)
        config, folder = settle(settings(), output.out)
    display = Display(output.quiet or output.as_json)
    for note in notes(config, world):
        display.print(note)
    there = RunFolder(folder)
    done = there.is_finished() and there.read_config().rounds >= config.rounds
    with display.open(folder, anew=output.overwrite), watching(openers) as watchers:
        on = evaluated_on(config)
        watch = display.watch(config.algorithm, config.rounds, on) if not done or output.overwrite else None
        if openers and watch is not None:
            watch = watchers.watch(config, folder, watch)
        summary = execute(config, folder, overwrite=output.overwrite, watch=watch, world=world)
    if output.as_json:
        click.echo(json.dumps({"folder": str(folder), **summary}))
    elif not output.quiet:
        if done and watch is None:
            click.echo(f"{folder}: this run is already finished")
        print_scores(summary, on)
        click.echo(f"results: {folder}")
