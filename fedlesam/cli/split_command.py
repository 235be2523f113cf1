"""fedlesam split"""

import json
from pathlib import Path

import click

from fedlesam.cli.options import Settings, file, grouped_command, json_option, settings
from fedlesam.core.names import file_name
from fedlesam.runs import config as configs


@grouped_command(
    "split",
    "fedlesam split --split dirichlet:0.1 --clients 40",
    "fedlesam split --split pathological:3 --clients 20 --seed 7 --save splits/p3 --picture p3.png",
    "fedlesam run --split file:splits/p3",
)
@settings(only=["data", "data_dir", "split", "clients", "seed"])
@file("--save", "where to save the split for --split file:FILE  [splits/NAME.safetensors]")
@file("--picture", "where to draw samples per class and client, as in the paper's figure 5  [splits/NAME.png]", "PNG")
@json_option
def command(settings: Settings, save: Path | None, picture: Path | None, as_json: bool) -> None:
    """Divide a data set over clients; print, draw and save the split."""
    from fedlesam.cli.show import Display
    from fedlesam.data.splits import make_split, save_split
    from fedlesam.report.pictures import split_heat_map
    from fedlesam.runs.build import load_data

    config = configs.settle_data(settings())
    with Display(quiet=as_json).open():
        data = load_data(config)
    split = make_split(config.split, data, config.clients, config.seed)
    labels = data.train.y.numpy()
    counts = split.class_counts(labels, len(data.classes))
    held, sizes, deviation = (counts > 0).sum(1), split.sizes, split.deviation(labels)
    stem = file_name(f"{config.data}-{config.split}-{len(sizes)}-seed{config.seed}")
    save, picture = save or Path(f"splits/{stem}.safetensors"), picture or Path(f"splits/{stem}.png")
    save_split(split, data, save)
    title = f"{config.data}, {split.scheme}: samples per class and client"
    split_heat_map(counts, list(data.classes), picture, title)
    summary = {
        "split": split.scheme,
        "clients": len(sizes),
        "samples per client": f"{sizes.min()} to {sizes.max()}, mean {sizes.mean():.1f}",
        "classes per client": f"{held.min()} to {held.max()}, mean {held.mean():.1f}",
        "repeated samples": split.repeats,
        **({"samples left out for the test": len(split.test)} if split.test is not None else {}),
        "samples not used": split.dropped,
        "deviation from the drawn proportions": "none were drawn" if deviation is None else f"{deviation:.3f}",
        "hash": split.hash,
    }
    if as_json:
        click.echo(json.dumps({**summary, "sizes": sizes.tolist(), "class_counts": counts.tolist()}))
        return
    for name, value in summary.items():
        click.echo(f"{name + ':':<38}{value}")
    for what, path in (("saved", save), ("picture", picture)):
        click.echo(f"{what + ':':<38}{path}")
