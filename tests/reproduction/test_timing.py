"""Table 8's seconds: methods take turns, are measured once, and together."""

import json
from pathlib import Path

import pytest

from fedlesam.federation import Federation, Record
from fedlesam.runs import config as configs
from fedlesam.runs.config import RunConfig
from reproduction import timing


def settled(method: str) -> RunConfig:
    values = {"algorithm": method, "data": "digits", "model": "mlp:hidden=4", "clients": 4, "active": 1, "rounds": 3}
    return configs.resolve(configs.update(RunConfig(), values))


def test_they_take_turns_and_the_first_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real = Federation.round

    def timed(self: Federation) -> Record:
        two_passes = self.algorithm.perturbation.passes == 2
        order.append("fedsam" if two_passes else "fedavg")
        record = real(self)
        turn = order.count(order[-1])
        object.__setattr__(record, "seconds", (100.0 if turn == 1 else turn) * (2 if two_passes else 1))
        return record

    monkeypatch.setattr(Federation, "round", timed)
    methods = {"fedavg": settled("fedavg"), "fedsam": settled("fedsam")}
    found = timing.per_round(methods, tmp_path / "clock.json")
    assert order == ["fedavg", "fedsam"] * (1 + timing.TURNS)
    assert found == {"fedavg": 4.0, "fedsam": 8.0}  # turns 2 to 6
    assert timing.per_round(methods, tmp_path / "clock.json") == found
    assert len(order) == 2 * (1 + timing.TURNS)
    timing.per_round({"scaffold": settled("scaffold")} | methods, tmp_path / "clock.json")
    assert len(json.loads((tmp_path / "clock.json").read_text())) == 3 and len(order) == 5 * (1 + timing.TURNS)
