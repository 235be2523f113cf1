"""From the tables that were asked for to the runs they need."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fedlesam.config import RunConfig
from fedlesam.experiments import estimate
from fedlesam.experiments.items import ITEMS, Ask, Item
from fedlesam.experiments.scales import SCALES, Scale, on_scale, settle
from fedlesam.names import unknown

KEYS: dict[str, Callable[[Ask], str]] = {
    "methods": lambda ask: ask.method,
    "splits": lambda ask: ask.split,
    "data": lambda ask: ask.data,
    "clients": lambda ask: str(ask.clients),
}


@dataclass(frozen=True)
class Only:
    """What is left of the tables; an empty set leaves all."""

    methods: frozenset[str] = frozenset()
    splits: frozenset[str] = frozenset()
    data: frozenset[str] = frozenset()
    clients: frozenset[str] = frozenset()

    def keeps(self, ask: Ask) -> bool:
        return all(not getattr(self, key) or of(ask) in getattr(self, key) for key, of in KEYS.items())

    def keeps_method(self, name: str) -> bool:
        return not self.methods or name in self.methods


def parse_only(text: str) -> Only:
    """`methods=fedavg,fedlesam,splits=dirichlet-0.1`: what has no `=` belongs to the key before it."""
    found: dict[str, set[str]] = {}
    key = ""
    every = [ask for item in ITEMS.values() for scale in SCALES.values() for ask in on_scale(item, scale).asks]
    for word in filter(None, (word.strip() for word in text.split(","))):
        before, equals, value = word.partition("=")
        key = before if equals else key
        if key not in KEYS:
            raise ValueError(f"--only {text}: {unknown('selection', key or word, KEYS)}; e.g. methods=fedavg,fedlesam")
        known = dict.fromkeys(KEYS[key](ask) for ask in every)
        value = value if equals else word
        if value not in known:
            raise ValueError(f"--only {text}: {unknown(key, value, known)}")
        found.setdefault(key, set()).add(value)
    return Only(**{key: frozenset(values) for key, values in found.items()})


def find_items(names: Iterable[str]) -> list[Item]:
    wanted = list(dict.fromkeys(names))
    for name in wanted:
        if name not in ITEMS and name != "all":
            raise unknown("table or figure", name, [*ITEMS, "all"])
    return list(ITEMS.values()) if "all" in wanted else [item for item in ITEMS.values() if item.name in wanted]


@dataclass(frozen=True)
class Plan:
    items: list[Item]
    """With the asks that are left of them."""
    runs: dict[Ask, list[RunConfig]]
    """By the plain ask, one a seed."""
    holes: dict[Ask, str]


def make(
    items: Sequence[Item], only: Only, scale: Scale, seeds: int, data_dir: str | None = None, workers: int = 1
) -> Plan:
    """A run two tables need is planned once, with what any of them wants measured."""
    kept = [
        dataclasses.replace(item, asks=tuple(ask for ask in on_scale(item, scale).asks if only.keeps(ask)))
        for item in items
    ]
    probes: dict[Ask, tuple[str, ...]] = {}
    for item in kept:
        for ask in item.asks:
            probes[ask.plain] = tuple(dict.fromkeys((*probes.get(ask.plain, ()), *ask.probes)))
    runs: dict[Ask, list[RunConfig]] = {}
    holes: dict[Ask, str] = {}
    for plain, wanted in probes.items():
        ask = dataclasses.replace(plain, probes=wanted)
        settled = [settle(ask, scale, seed, data_dir, workers) for seed in range(seeds)]
        for config in settled:
            if isinstance(config, str):
                holes[plain] = config
            else:
                runs.setdefault(plain, []).append(config)
    return Plan(kept, runs, holes)


def price(item: Item, scale: Scale) -> str:
    """About what it takes with the scale's own number of seeds."""
    if not item.asks:
        return "seconds"
    if scale.name == "full":
        cost, unit = sum(estimate.gpu_seconds(ask, scale) for ask in item.trained) * scale.seeds, "GPU"
    else:
        plan = make([item], Only(), scale, scale.seeds)
        if not plan.runs:
            return "left out"
        different = {str(config): config for configs in plan.runs.values() for config in configs}
        cost, unit = sum(map(estimate.seconds, different.values())), "core"
    return f"{estimate.spoken(cost)} {unit}"
