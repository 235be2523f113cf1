"""The runs that the requested tables need."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedlesam.core.names import unknown
from fedlesam.runs.config import RunConfig, resolve, update
from reproduction.items import ITEMS, Item, RunSpec
from reproduction.scales import SCALES, Scale, on_scale, settle

KEYS: dict[str, Callable[[RunSpec], str]] = {
    "methods": lambda spec: spec.method,
    "splits": lambda spec: spec.split,
    "data": lambda spec: spec.data,
    "clients": lambda spec: str(spec.clients),
}


@dataclass(frozen=True)
class Only:
    """What is left of the tables; an empty set leaves all."""

    methods: frozenset[str] = frozenset()
    splits: frozenset[str] = frozenset()
    data: frozenset[str] = frozenset()
    clients: frozenset[str] = frozenset()

    def keeps(self, spec: RunSpec) -> bool:
        return all(not getattr(self, key) or of(spec) in getattr(self, key) for key, of in KEYS.items())

    def keeps_method(self, name: str) -> bool:
        return not self.methods or name in self.methods


def parse_only(text: str) -> Only:
    """`methods=fedavg,fedlesam,splits=dirichlet-0.1`: what has no `=` belongs to the key before it."""
    every = [spec for item in ITEMS.values() for scale in SCALES.values() for spec in on_scale(item, scale).specs]
    known = {key: list(dict.fromkeys(of(spec) for spec in every)) for key, of in KEYS.items()}
    return Only(**{key: frozenset(values) for key, values in parse_selection(text, known).items()})


def parse_selection(text: str, known: Mapping[str, Sequence[str]]) -> dict[str, set[str]]:
    """The values by key; a ValueError for what is not known.

    Args:
        text: As for `parse_only`.
        known: The values that each key can have.
    """
    found: dict[str, set[str]] = {}
    key = ""
    for word in filter(None, (word.strip() for word in text.split(","))):
        before, equals, value = word.partition("=")
        key = before if equals else key
        if key not in known:
            raise ValueError(f"--only {text}: {unknown('selection', key or word, known)}; e.g. methods=fedavg,fedlesam")
        value = value if equals else word
        if value not in known[key]:
            raise ValueError(f"--only {text}: {unknown(key, value, known[key])}")
        found.setdefault(key, set()).add(value)
    return found


def find_items(names: Iterable[str]) -> list[Item]:
    wanted = list(dict.fromkeys(names))
    for name in wanted:
        if name not in ITEMS and name != "all":
            raise unknown("table or figure", name, [*ITEMS, "all"])
    return list(ITEMS.values()) if "all" in wanted else [item for item in ITEMS.values() if item.name in wanted]


@dataclass(frozen=True)
class Plan:
    items: list[Item]
    """With the runs that `--only` keeps."""
    runs: dict[RunSpec, list[RunConfig]]
    """By the run without probes: a configuration per seed."""
    missing: dict[RunSpec, str]


def make(
    items: Sequence[Item],
    only: Only,
    scale: Scale,
    seeds: int,
    data_dir: str | None = None,
    workers: int = 1,
    stack_runs: int | None = None,
) -> Plan:
    """A run that two tables need is planned once, with the probes of both."""
    kept = [
        dataclasses.replace(item, specs=tuple(spec for spec in on_scale(item, scale).specs if only.keeps(spec)))
        for item in items
    ]
    probes: dict[RunSpec, tuple[str, ...]] = {}
    for item in kept:
        for spec in item.specs:
            probes[spec.plain] = tuple(dict.fromkeys((*probes.get(spec.plain, ()), *spec.probes)))
    runs: dict[RunSpec, list[RunConfig]] = {}
    missing: dict[RunSpec, str] = {}
    for plain, wanted in probes.items():
        spec = dataclasses.replace(plain, probes=wanted)
        settled = [settle(spec, scale, seed, data_dir, workers) for seed in range(seeds)]
        for config in settled:
            if isinstance(config, str):
                missing[plain] = config
            else:
                runs.setdefault(plain, []).append(resolve(update(config, {"stack_runs": stack_runs})))
    return Plan(kept, runs, missing)


def count(plan: Plan) -> tuple[int, int]:
    """Different runs, and their rounds."""
    different = {str(config): config.rounds for configs in plan.runs.values() for config in configs}
    return len(different), sum(different.values())
