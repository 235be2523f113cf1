"""Probes by the text a user types, e.g. `sharpness:radius=0.05,every=20`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from fedlesam.algorithms import Algorithm
from fedlesam.core.names import unknown
from fedlesam.federation import Federation
from fedlesam.probes.base import Probe
from fedlesam.probes.drift import DriftProbe, perturbs
from fedlesam.probes.estimate import Estimate
from fedlesam.probes.hessian import Hessian
from fedlesam.probes.sharpness import Sharpness
from fedlesam.probes.surface import Grid

T = TypeVar("T")
PROBES: dict[str, type[Probe]] = {probe.name: probe for probe in (Sharpness, Hessian, DriftProbe, Estimate)}
YES_OR_NO = {"yes": True, "true": True, "no": False, "false": False}
OFFLINE: dict[str, type[Probe | Grid]] = {**PROBES, "surface": Grid}


def parse(text: str) -> list[Probe]:
    """The probes of a setting.

    Args:
        text: Such as `sharpness:every=5 drift`.
    """
    found = {}
    for word in text.split():
        probe = _one(word)
        if probe.name in found:
            raise ValueError(f"probe {probe.name} is named twice; a run takes each at most once")
        found[probe.name] = probe
    return list(found.values())


def parse_offline(text: str) -> Probe | Grid:
    """A probe of runs in their folders.

    Args:
        text: Such as `hessian:k=5` or `surface:dims=1`.
    """
    return _made(text, OFFLINE)


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
    if text.partition(":")[0] == "surface":
        raise ValueError("probe surface: is measured on a finished run, with `fedlesam probe RUN --probe surface`")
    return _made(text, PROBES)


def _made(text: str, kinds: Mapping[str, type[T]]) -> T:
    name = text.partition(":")[0]
    if name not in kinds:
        raise unknown("probe", name, kinds)
    return kinds[name](**_options(text, kinds[name]))


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
            found[key] = YES_OR_NO[value.lower()] if kinds[key] is bool else kinds[key](value)
        except (ValueError, KeyError):
            expected = {bool: "yes or no", int: "a whole number", float: "a number"}[kinds[key]]
            raise ValueError(f"{where}: {key} must be {expected}, got {value!r}") from None
    return found
