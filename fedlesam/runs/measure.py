"""Probes of runs in their folders, finished or at their last checkpoint: what `fedlesam probe` does."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlesam.data.dataset import DataSet
from fedlesam.probes.base import Look, Probe, Tick, run_context
from fedlesam.probes.catalogue import parse_offline
from fedlesam.probes.drift import perturbs
from fedlesam.probes.during import take
from fedlesam.probes.loss import GlobalLoss
from fedlesam.probes.readings import Reading
from fedlesam.probes.surface import Grid, surface_of
from fedlesam.runs.build import load_data
from fedlesam.runs.checkpoint import Checkpoints
from fedlesam.runs.config import RunConfig, data_settings
from fedlesam.runs.folder import RunFolder
from fedlesam.runs.methods import is_centralised, method_name
from fedlesam.runs.reopen import moved, open_between_rounds, open_run, read_config

Progress = Callable[[Path, str], Tick]
"""Called with a run and the name of a probe before it is measured; what it returns is called with how much is done."""


@dataclass(frozen=True)
class Measured:
    """What one probe found in one run."""

    run: Path
    """The run folder."""
    config: RunConfig
    """The run's settings."""
    request: int
    """The place of the probe among those asked for."""
    probe: str
    """Its name."""
    reading: Reading | None = None
    """None of a surface."""
    file: Path | None = None
    """The file of a surface."""
    dims: int = 0
    """The dimensions of a surface."""


def measure(
    paths: Sequence[Path],
    probes: Sequence[str | Probe | Grid] = ("sharpness",),
    *,
    data_dir: str | None = None,
    device: str | None = None,
    progress: Progress = lambda path, probe: lambda done, of: None,
) -> list[Measured]:
    """Measure runs in the same way and write what was found into their folders.

    Centralised training among federated runs is measured on the clients of one of them. Drift is not measured of
    methods without a perturbation if there are other runs.

    Args:
        paths: Run folders.
        probes: Probes as typed, for instance `hessian:k=5` or `surface:dims=1`, or as objects.
        data_dir: Where the files of the data set are, if not where the runs found them.
        device: `cpu`, `cuda` or `cuda:i`, if not that of the runs.
        progress: Called before each measurement.

    Returns:
        One entry per run and probe, in the order of the runs.
    """
    wanted = [parse_offline(probe) if isinstance(probe, str) else probe for probe in probes]
    configs = {path: read_config(path, data_dir, device) for path in dict.fromkeys(map(Path, paths))}
    _check_memories(list(configs), wanted)
    hosts, found, sizes = _hosts(configs), list[Measured](), dict[int, Path]()
    data, loaded = None, None
    for path, config in configs.items():
        if data is None or loaded != data_settings(config):
            data, loaded = load_data(config), data_settings(config)
        look, metadata = _open(path, configs, data, hosts.get(path), _reads_memories(path, wanted))
        for number, probe in enumerate(wanted):
            if isinstance(probe, Grid):
                sizes[look.federation.state.weights.numel()] = path
                _check_one_model(sizes)
                file = _surface(path, config, look, probe, metadata, progress(path, "surface"))
                found.append(Measured(path, config, number, "surface", file=file, dims=probe.dims))
            elif not _is_skipped(probe, look, path in hosts, len(configs)):
                probe.check(look.federation)
                shown = dataclasses.replace(look, tick=progress(path, probe.name))
                reading = take(probe, shown, RunFolder(path).probes, metadata)
                found.append(Measured(path, config, number, probe.name, reading))
    return found


def _open(
    path: Path, configs: dict[Path, RunConfig], data: DataSet, host: Path | None, memories: bool
) -> tuple[Look, dict[str, Any]]:
    """What the probes are shown, and what a reader must know of it."""
    config = configs[path]
    look = open_between_rounds(path, config, data) if memories else Look(open_run(path, config, data))
    if host is None:
        return dataclasses.replace(look, trains_on=memories), {}
    federation = moved(open_run(host, configs[host], data), look.federation)
    return Look(federation, trains_on=False), {"clients": f"those of {host.name}"}


def _surface(path: Path, config: RunConfig, look: Look, grid: Grid, more: dict[str, Any], tick: Tick) -> Path:
    state = look.federation.state
    metadata = {"algorithm": config.algorithm, "seed": config.seed, "rounds": state.round, **more}
    loss, file = GlobalLoss.of(look.federation, grid.samples or None), RunFolder(path).surface(grid.dims)
    with run_context(look.federation):
        surface_of(loss, state.weights, grid, file, metadata, tick)
    return file


def _reads_memories(path: Path, wanted: Sequence[Probe | Grid]) -> bool:
    """Whether to load the clients' memories: it takes time, so only where they are there and of use."""
    folder, probes = RunFolder(path), [probe for probe in wanted if isinstance(probe, Probe)]
    if any(not probe.at_end for probe in probes):
        return True
    if folder.is_finished() or not any(probe.reads_memories for probe in probes):
        return False
    return bool(Checkpoints(folder.checkpoints).found())


def _is_skipped(probe: Probe, look: Look, hosted: bool, runs: int) -> bool:
    """Among several runs: drift of a method that does not perturb, and what centralised training does not have."""
    without = probe.name == "drift" and runs > 1 and not perturbs(look.federation.algorithm)
    return not probe.at_end and (hosted or without)


def _check_memories(paths: list[Path], wanted: Sequence[Probe | Grid]) -> None:
    """Before anything is measured."""
    for probe in wanted:
        without = [path for path in paths if not Checkpoints(RunFolder(path).checkpoints).found()]
        if without and isinstance(probe, Probe) and not probe.at_end:
            raise ValueError(
                f"{without[0]}: {probe.name} needs the clients' memories, but this run has no checkpoint; measure it "
                f"while training, with `fedlesam run --probe {probe.name}:every=10`, or train without --no-keep"
            )


def _check_one_model(sizes: dict[int, Path]) -> None:
    if len(sizes) > 1:
        (one, there), (other, here) = list(sizes.items())[:2]
        raise ValueError(
            f"surface: {there} has {one:,} parameters and {here} has {other:,}: directions can be shared only by runs "
            "of the same model; call it for each model alone"
        )


def _hosts(configs: dict[Path, RunConfig]) -> dict[Path, Path]:
    """For centralised training among federated runs, the run on whose clients it is measured: the same samples."""
    alone = {path for path, c in configs.items() if is_centralised(method_name(c.algorithm, c.split))}
    problem = {path: (*data_settings(config), config.model) for path, config in configs.items()}
    hosts = {}
    for path in alone:
        like = [other for other in configs if other not in alone and problem[other] == problem[path]]
        if like:
            hosts[path] = min(like, key=lambda other: configs[other].seed != configs[path].seed)
    return hosts
