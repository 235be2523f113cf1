"""Probes by the text a user types, e.g. `sharpness:radius=0.05,every=20`."""

import dataclasses
from typing import Any

from fedlesam.algorithms import Algorithm
from fedlesam.core.names import unknown
from fedlesam.federation import Federation
from fedlesam.probes.base import Probe
from fedlesam.probes.drift import DriftProbe, perturbs
from fedlesam.probes.estimate import Estimate
from fedlesam.probes.hessian import Hessian
from fedlesam.probes.sharpness import Sharpness
from fedlesam.probes.surface import Grid

PROBES: dict[str, type[Probe]] = {probe.name: probe for probe in (Sharpness, Hessian, DriftProbe, Estimate)}
OFFLINE = (*PROBES, "surface")


def parse(text: str) -> list[Probe]:
    """The probes of a setting.

    Args:
        text: Such as `sharpness:every=5 drift`.
    """
    found = [_one(word) for word in text.split()]
    names = [probe.name for probe in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"probe {name} is named twice; a run takes each at most once")
    return found


def parse_offline(text: str) -> Probe | Grid:
    """A probe of runs in their folders.

    Args:
        text: Such as `hessian:k=5` or `surface:dims=1`.
    """
    name = text.partition(":")[0]
    if name == "surface":
        return Grid(**_options(text, Grid))
    if name not in PROBES:
        raise unknown("probe", name, OFFLINE)
    return _one(text)


def attach(text: str | None, federation: Federation) -> list[Probe]:
    """The probes of a setting, checked against the federation that they will measure.

    Args:
        text: As for `parse`; None for none.
        federation: What will be measured.
    """
    found = parse(text or "")
    for probe in found:
        probe.check(federation)
    return found


def fitting(text: str | None, algorithm: Algorithm) -> str | None:
    """The probes of a comparison that fit a method: drift needs a perturbation.

    Args:
        text: As for `parse`; None for none.
        algorithm: The method.
    """
    if text is None or perturbs(algorithm):
        return text
    return " ".join(word for word in text.split() if _one(word).name != "drift") or None


def _one(text: str) -> Probe:
    name = text.partition(":")[0]
    if name == "surface":
        raise ValueError("probe surface: is measured of a finished run, with `fedlesam probe RUN --probe surface`")
    if name not in PROBES:
        raise unknown("probe", name, PROBES)
    return PROBES[name](**_options(text, PROBES[name]))


def _options(text: str, kind: type[Any]) -> dict[str, Any]:
    """The `key=value,...` of `name:key=value,...`, by the types of the fields."""
    where = f"probe {text}"
    kinds: dict[str, type[Any]] = {f.name: type(f.default) for f in dataclasses.fields(kind)}
    found: dict[str, Any] = {}
    for item in filter(None, text.partition(":")[2].split(",")):
        key, _, value = item.partition("=")
        if key not in kinds:
            raise ValueError(f"{where}: {unknown('option', key, kinds)}")
        try:
            if kinds[key] is bool:
                found[key] = {"yes": True, "true": True, "no": False, "false": False}[value.lower()]
            else:
                found[key] = kinds[key](value)
        except (ValueError, KeyError):
            expected = {bool: "yes or no", int: "a whole number", float: "a number"}[kinds[key]]
            raise ValueError(f"{where}: {key} must be {expected}, got {value!r}") from None
    return found
