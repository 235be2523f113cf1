"""What runs that differ in settings reached: lines over one setting, a grid over two, parallel axes over more."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from fedlesam.core.checks import is_number
from fedlesam.report.groups import Comparison, Group, shown
from fedlesam.runs.stats import SeedMean, seed_mean

FEWEST = 3
"""Choices of settings of a method, below which there is nothing to see."""


@dataclass(frozen=True)
class Point:
    """A group of the comparison, and where it is."""

    group: int
    """The place of the group in the comparison."""
    values: tuple[Any, ...]
    """Of the settings, in their order; None where it has none."""
    score: SeedMean
    """Of the measure that ranks."""
    seeds: int
    """The runs it is the mean of."""


@dataclass(frozen=True)
class View:
    """The points of one method, or of several over the same one setting."""

    form: Literal["lines", "grid", "parallel"]
    """How it is drawn: curves over one setting, a grid over two, parallel axes over more."""
    settings: tuple[str, ...]
    """Their names, in the order of a point's values."""
    points: dict[str, list[Point]]
    """By method."""
    beside: dict[str, Point]
    """Methods that do not have the setting: lines over one setting are compared with them."""

    @property
    def name(self) -> str:
        """Among other views."""
        of = "" if self.form == "lines" else f"{next(iter(self.points))}: "
        return of + (" and ".join(self.settings) if len(self.settings) < 3 else f"{len(self.settings)} settings")

    def axis(self, place: int) -> list[Any]:
        """The values of a setting: numbers in their order, then the others.

        Args:
            place: Of the setting.
        """
        found = {shown(p.values[place]): p.values[place] for points in self.points.values() for p in points}
        numbers = sorted((v for v in found.values() if is_number(v)), key=float)
        return [*numbers, *(found[text] for text in sorted(found) if not is_number(found[text]))]

    def is_log(self, place: int) -> bool:
        """Whether the values of a setting are numbers that span more than an order of magnitude.

        Args:
            place: Of the setting.
        """
        values = self.axis(place)
        return all(is_number(v) and v > 0 for v in values) and values[-1] > 10 * values[0]


def views(comparison: Comparison) -> list[View]:
    """What can be seen of a sweep; empty where no method was tried with several settings.

    Args:
        comparison: The groups of runs that are compared.
    """
    methods: dict[str, list[tuple[int, Group]]] = defaultdict(list)
    for i, group in enumerate(comparison.groups):
        methods[group.method].append((i, group))
    swept = {method: _varied(group for _, group in found) for method, found in methods.items()}
    over_one: dict[str, dict[str, list[Point]]] = defaultdict(dict)
    others: list[View] = []
    for method, names in swept.items():
        points = _points(methods[method], names)
        if names and len(points) >= FEWEST:
            if len(names) == 1:
                over_one[names[0]][method] = points
            else:
                others.append(View("grid" if len(names) == 2 else "parallel", tuple(names), {method: points}, {}))
    beside = {method: found for method, names in swept.items() if not names for found in _points(methods[method], [])}
    lines = [View("lines", (name,), found, beside) for name, found in over_one.items()]
    return [*lines, *others]


def _varied(groups: Iterable[Group]) -> list[str]:
    tables = [group.settings for group in groups]
    names = dict.fromkeys(name for table in tables for name in table if name != "algorithm")
    return [name for name in names if len({repr(table.get(name)) for table in tables}) > 1]


def _points(groups: list[tuple[int, Group]], names: list[str]) -> list[Point]:
    """Of the groups that were evaluated."""
    found = []
    for i, group in groups:
        score = seed_mean([run.scores["mean_of_last"] for run in group.runs if "mean_of_last" in run.scores])
        if score is not None:
            found.append(Point(i, tuple(group.settings.get(name) for name in names), score, len(group.runs)))
    return found
