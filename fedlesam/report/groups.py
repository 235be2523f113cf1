"""What was compared: runs that differ only in their seed are one group, and all else that differs is named."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlesam.core.checks import is_number
from fedlesam.core.names import is_path
from fedlesam.probes.readings import Surface
from fedlesam.report.style import Look, looks
from fedlesam.runs import config as configs
from fedlesam.runs.config import RunConfig
from fedlesam.runs.evaluated import Measure
from fedlesam.runs.methods import is_centralised, method_name
from fedlesam.runs.read import Run

ASIDE = (*configs.NO_MATTER, "seed", "threads", "device", "evaluate_every", "per_client")
"""Settings in which the runs of one group may differ."""

MUST_AGREE = ("data", "model")
"""Where these differ, no number of one run says anything about the other's method."""

Settings = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """The runs of one method with one choice of settings, a seed each."""

    label: str
    """The method, and where it differs from its neighbours in more than that."""
    look: Look
    """Its colour and line style."""
    runs: list[Run]
    """In the order of their seeds."""
    settings: Settings
    """Those of its runs but for the seed."""

    @property
    def method(self) -> str:
        """The name of the method."""
        return self.runs[0].method

    @property
    def centralised(self) -> bool:
        """Whether all data are in one place."""
        return self.runs[0].centralised

    @property
    def seeds(self) -> list[int]:
        """The seeds of its runs."""
        return [run.config.seed for run in self.runs]

    @property
    def values(self) -> str:
        """Hyper-parameters that are numbers and not in the label."""
        told = {word.partition("=")[0] for word in self.label.split()}
        return numbers({name: value for name, value in self.runs[0].config.hyper.items() if name not in told})

    @property
    def legend(self) -> str:
        """The label with its hyper-parameters."""
        return f"{self.label} {self.values}".strip()

    def surface(self, dims: int) -> Surface | None:
        """The loss surface of the first seed that has one.

        Args:
            dims: 1 or 2.
        """
        return next((found for run in self.runs if (found := run.surface(dims)) is not None), None)


@dataclass(frozen=True)
class Comparison:
    """Runs that can be compared, in groups."""

    groups: list[Group]
    """In the order in which the user named the runs."""
    notes: list[str]
    """What a reader should know before believing a difference."""

    @property
    def runs(self) -> list[Run]:
        """The runs of all groups."""
        return [run for group in self.groups for run in group.runs]

    @property
    def evaluated_on(self) -> str:
        """test, or held-out: of all runs the same."""
        return self.runs[0].evaluated_on

    @property
    def measure(self) -> Measure:
        """What the runs are ranked by: of all that were evaluated the same."""
        return next((run.measure for run in self.runs if run.scores), self.runs[0].measure)

    @property
    def baseline(self) -> Group | None:
        """FedAvg, the field's unit; where there are several, the one most like the other runs."""
        found = [group for group in self.groups if group.method == "fedavg"]
        tables = [group.settings for group in self.groups]

        def likeness(group: Group) -> int:
            return sum(table.get(name) == value for table in tables for name, value in group.settings.items())

        return max(found, key=likeness) if found else None

    @property
    def federated(self) -> list[Group]:
        """The groups that can be compared in everything; all of them where there is centralised training alone."""
        return [group for group in self.groups if not group.centralised] or self.groups

    def splits(self) -> list[tuple[RunConfig, NDArray[np.int64]]]:
        """For each way the data were divided, the first run's configuration and its samples by client and class."""
        found: dict[tuple[str, int | None], tuple[RunConfig, NDArray[np.int64]]] = {}
        for run in (run for group in self.federated for run in group.runs):
            key = run.config.split, run.config.clients
            if key not in found and (counts := run.class_counts()) is not None and counts.size:
                found[key] = run.config, counts
        return list(found.values())

    @property
    def common(self) -> Settings:
        """What all groups share."""
        return shared(self.groups)

    @property
    def varied(self) -> list[str]:
        """The settings in which groups differ."""
        names = dict.fromkeys(name for group in self.groups for name in group.settings)
        return [name for name in names if name not in self.common]


def shared(groups: Iterable[Group]) -> Settings:
    """The settings that all groups have in common.

    Args:
        groups: The groups.
    """
    first, *others = (group.settings for group in groups)
    return {k: v for k, v in first.items() if all(k in o and repr(o[k]) == repr(v) for o in others)}


def settings_of(config: RunConfig) -> Settings:
    """The settings and hyper-parameters that must agree within a group.

    Args:
        config: The settings of a run.
    """
    table = configs.as_table(config)
    hyper = table.pop("hyper")
    return {**{k: v for k, v in table.items() if k not in ASIDE}, **hyper}


def compare_runs(runs: list[Run]) -> Comparison:
    """Group runs by their settings. Runs that cannot be compared are refused; doubts about a comparison are noted.

    Args:
        runs: The runs.
    """
    if not runs:
        raise ValueError("there are no runs to report")
    for name in MUST_AGREE:
        if seen := _unlike(runs, attrgetter(f"config.{name}")):
            raise ValueError(f"these runs cannot be compared, {name} is {seen}: make a report for each {name}")
    if seen := _unlike(runs, lambda run: run.config.task or "classification"):
        raise ValueError(f"these runs cannot be compared, task is {seen}: make a report for each task")
    if seen := _unlike(runs, lambda run: f"on {run.evaluated_on} samples"):
        raise ValueError(f"these runs cannot be compared, they are evaluated {seen}: make a report for each")
    if seen := _unlike([run for run in runs if run.scores], lambda run: f"by {run.measure.title}"):
        raise ValueError(f"these runs cannot be compared, they are ranked {seen}: make a report for each")
    notes = []
    by_settings: dict[tuple[Any, ...], dict[int, Run]] = defaultdict(dict)
    for run in runs:
        seeds = by_settings[tuple(sorted((k, repr(v)) for k, v in settings_of(run.config).items()))]
        other = seeds.setdefault(run.config.seed, run)
        if other is not run:  # the same twice would pass for a spread over seeds: the longer run stays
            kept, dropped = (run, other) if len(run.records) > len(other.records) else (other, run)
            seeds[run.config.seed] = kept
            notes.append(f"{dropped.path} is dropped: {kept.path} has the same settings and seed.")
    members = [list(seeds.values()) for seeds in by_settings.values()]
    chosen = [own[0].config for own in members]
    shown_as = zip(labels(chosen), looks([own[0].method for own in members]), strict=True)
    groups = [
        Group(label, look, own, settings_of(config))
        for (label, look), own, config in zip(shown_as, members, chosen, strict=True)
    ]
    return Comparison(groups, [*notes, *_doubts(Comparison(groups, notes))])


def _unlike(runs: list[Run], of: Callable[[Run], str]) -> str:
    """The different values with the first run of each; empty if there is one value alone."""
    first = {of(run): run for run in reversed(runs)}
    return ", ".join(f"{value} in {run.path}" for value, run in reversed(first.items())) if len(first) > 1 else ""


def labels(chosen: list[RunConfig]) -> list[str]:
    """A name for each group: the method, and the settings in which it differs from the others.

    Hyper-parameters of a method are compared only with other groups of that method, all other settings with all groups.
    If groups of one method differ in a setting, the default is not named. Centralised training is compared only with
    centralised training, since its split, clients, epochs and rounds are not those of a federation.

    Args:
        chosen: The settings of the groups.
    """
    tables = [settings_of(config) for config in chosen]
    names = [method_name(config.algorithm, config.split) for config in chosen]

    def of_method(name: str) -> bool:
        return name == "lr_decay" or any(name in config.hyper for config in chosen)

    found, all_of_them = [], list(zip(tables, names, strict=True))
    for config, (table, method) in zip(chosen, all_of_them, strict=True):
        words, same = [method], [t for t, m in all_of_them if m == method]
        for name in table:
            own = of_method(name) or is_centralised(method)
            peers = [t for t, m in all_of_them if m == method or not (own or is_centralised(m))]
            usual = Counter(repr(t.get(name)) for t in peers).most_common(1)[0][0]
            if len({repr(t.get(name)) for t in same}) > 1:
                usual = repr(defaults(config.algorithm, config.data).get(name))
            if name != "algorithm" and repr(table[name]) != usual:
                words.append(f"{name}={shown(table[name], name)}")
        found.append(" ".join(words))
    return [label if found.count(label) == 1 else f"{label} #{i + 1}" for i, label in enumerate(found)]


@cache
def defaults(algorithm: str, data: str) -> Settings:
    """The settings of a run that gives only a method and a data set; empty for a method of the user's own.

    Args:
        algorithm: The method.
        data: The name of the data set.
    """
    if is_path(algorithm):
        return {}
    try:
        return settings_of(configs.resolve(RunConfig(algorithm=algorithm, data=data)))
    except ValueError:
        return {}


def shown(value: Any, name: str = "") -> str:
    """A setting for readers. A share of clients or samples is not shown as a count: 1.0 is all of them, 1 is one.

    Args:
        value: Its value.
        name: The setting.
    """
    return f"{value:g}" if isinstance(value, float) and name not in configs.SHARES else str(value)


def numbers(hyper: Mapping[str, Any]) -> str:
    """The hyper-parameters that are numbers; without a server step of 1, the plain mean.

    Args:
        hyper: Of a method.
    """
    found = [(name, value) for name, value in hyper.items() if is_number(value) and (name, value) != ("lr_g", 1)]
    return ", ".join(f"{name}={shown(value)}" for name, value in found)


def _doubts(comparison: Comparison) -> list[str]:
    runs, notes = comparison.runs, []
    for run in runs:
        if not run.finished:
            why = f": {run.summary['why']}" if run.summary.get("why") else ""
            notes.append(f"{run.path} is not finished, {len(run.records)} of {run.config.rounds} rounds{why}.")
    for name in ("rounds", "split", "clients", "active"):
        if name not in shared(comparison.federated) and any(name in g.settings for g in comparison.federated):
            values = [(shown(g.settings.get(name, "unset"), name), g.label) for g in comparison.federated]
            notes.append(f"The runs differ in more than the method, {name}: {_grouped(values)}.")
    if alone := [group for group in comparison.groups if group.centralised]:
        counted = [(group.settings.get("epochs"), group.label) for group in alone]
        rounds = _grouped((f"{'one epoch' if n == 1 else f'{n} epochs'} over all data", label) for n, label in counted)
        notes.append(f"Centralised training has all data in one place and sends nothing; a round of it is {rounds}.")
    if len({tuple(sorted(group.seeds)) for group in comparison.groups}) > 1:
        seeds = [(f"{len(g.seeds)} ({', '.join(map(str, sorted(g.seeds)))})", g.label) for g in comparison.groups]
        notes.append(f"Not every method has the same seeds: {_grouped(seeds)}.")
    for key, doubt in {
        "machine": "Seconds were measured on different machines and cannot be compared",
        "fedlesam": "The runs were made by different versions of fedlesam",
        "commit": "The runs were made by different commits of fedlesam",
    }.items():
        found = list(dict.fromkeys(run.versions[key] for run in runs if key in run.versions))
        if len(found) > 1:
            notes.append(f"{doubt}: {', '.join(found)}.")
    if len({(run.config.workers, run.config.threads, run.config.device) for run in runs}) > 1:
        notes.append("Workers, threads or device differ between runs: their seconds cannot be compared.")
    hashes: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    for run in runs:
        if found_hash := (run.summary.get("split") or {}).get("hash"):
            hashes[run.config.split, run.config.clients, run.config.seed].add(found_hash)
    if any(len(different) > 1 for different in hashes.values()):
        notes.append("Runs of the same split and seed have different clients: their data are not the same.")
    return [*notes, *_probe_doubts(comparison.groups), *_probe_gaps(comparison.groups)]


OF_A_MODEL = ("weights", "algorithm", "seed", "rounds", "clients", "of")
"""What a measurement says of the model and its clients, not of how it was made."""


def is_how_measured(name: str, value: object) -> bool:
    """Whether an entry of a probe's metadata says how it was measured, and not which model it measured.

    Args:
        name: The entry.
        value: Its value.
    """
    return isinstance(value, int | float | str) and not isinstance(value, bool) and name not in OF_A_MODEL


def _probe_doubts(groups: list[Group]) -> list[str]:
    ways: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for group in groups:
        for run in group.runs:
            made = [(one.probe, one.metadata) for probe in run.probes for one in run.series(probe)]
            made += [(f"surface-{d}d", found.metadata) for d in (1, 2) if (found := run.surface(d)) is not None]
            for probe, metadata in made:
                known = {k: v for k, v in metadata.items() if is_how_measured(k, v) or isinstance(v, bool)}
                way = ", ".join(f"{k} {shown(v)}" for k, v in sorted(known.items())) or "no settings recorded"
                ways[probe].append((way, group.label))
    return [
        f"The probe {probe} was not made in the same way everywhere, and its values cannot be compared: "
        f"{_grouped(found)}."
        for probe, found in ways.items()
        if len({way for way, _ in found}) > 1
    ]


def _probe_gaps(groups: list[Group]) -> list[str]:
    """What probes could not read: of every method and probe how often, and the first reason."""
    notes = []
    for group in groups:
        made = [one for run in group.runs for one in run.measurements]
        for probe in dict.fromkeys(one.probe for one in made if one.missing):
            mine = [one for one in made if one.probe == probe]
            gaps = [one for one in mine if one.missing]
            count, first = f"{len(gaps)} of {len(mine)}", f"after round {gaps[0].round}: {gaps[0].missing}"
            notes.append(f"{group.label}: {count} readings of the probe {probe} lack something; the first, {first}.")
    return notes


def _grouped(pairs: Iterable[tuple[str, str]]) -> str:
    """Values, and the labels that have each."""
    by_value: dict[str, list[str]] = defaultdict(list)
    for value, label in pairs:
        by_value[value].append(label)
    return "; ".join(f"{value} ({', '.join(dict.fromkeys(labels))})" for value, labels in by_value.items())
