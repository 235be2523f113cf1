"""Does the claim hold? What is compared, and how: arms, grids of rho, seeds, conditions. Imports no PyTorch."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from fedlesam.runs import config as configs
from fedlesam.runs.config import RunConfig
from fedlesam.runs.kinds import Value
from reproduction.items import RunSpec
from reproduction.scales import Scale, settle

TUNING_SEED = 1000
"""The first of the seeds rho is chosen with; results are of the seeds from 0 on."""


@dataclass(frozen=True)
class Arm:
    name: str
    base: str = ""
    """The same method without a perturbation; empty for one that has none."""
    algorithm: str = ""
    """Its name in the catalogue, where that is another one."""
    hyper: Mapping[str, Value] = field(default_factory=dict)

    @property
    def method(self) -> str:
        return self.algorithm or self.name


ARMS = {
    arm.name: arm
    for arm in (
        Arm("fedavg"),
        Arm("fedadam"),
        Arm("scaffold"),
        Arm("fedcm"),
        Arm("feddyn"),
        Arm("fedsam", "fedavg"),
        Arm("mofedsam", "fedcm"),
        Arm("fedgamma", "scaffold"),
        Arm("fedsmoo", "feddyn"),
        Arm("fedlesam", "fedavg"),
        Arm("fedlesam-s", "scaffold"),
        Arm("fedlesam-d", "feddyn"),
        Arm("fedlesam-previous", "fedavg", "fedlesam", {"reference": "previous-round"}),
        Arm("fedlesam-ahead", "fedavg", "fedlesam", {"direction": "ahead"}),
        Arm("fedlesam-released", "fedavg"),
        Arm("fedlesam-released-s", "scaffold"),
        Arm("fedlesam-released-d", "feddyn"),
        Arm("random-round", "fedavg"),
        Arm("random-step", "fedavg"),
        Arm("freesam", "fedavg"),
        Arm("freesam-s", "scaffold"),
        Arm("freesam-d", "feddyn"),
    )
}


@dataclass(frozen=True)
class Condition:
    """A problem and a protocol under which arms are compared."""

    name: str
    arms: tuple[str, ...]
    rhos: tuple[float, ...]
    tuning_seeds: int
    seeds: int
    settings: Mapping[str, Value]
    """Where they are not the data set's defaults, or the scale's; printed."""
    held_out: int
    """Training images rho is chosen on."""
    curve: bool = False
    """Train every rho on the seeds of the results, not the chosen one alone. Without tuning seeds none is chosen."""
    probed: int = 0
    """Training images the probes look at, of the runs at the chosen rho, or of all where none is; 0 probes nothing."""
    paper: str = ""
    """A split of the paper's tables: the settings are then those of `reproduce` at this scale."""
    last: int = 20
    """Rounds whose evaluations are averaged."""

    @property
    def tuned(self) -> tuple[str, ...]:
        return tuple(name for name in self.arms if ARMS[name].base)

    def config(self, arm: str, rho: float | None, seed: int, where: "Where", tuning: bool = False) -> RunConfig:
        method, hyper = ARMS[arm].method, dict(ARMS[arm].hyper)
        if self.paper:
            settled = settle(
                RunSpec(method, "cifar10", self.paper, 100, 0.1), where.scale, seed, where.data_dir, where.workers
            )
            assert isinstance(settled, RunConfig)
            settled = configs.update(settled, dict(self.settings))
        else:
            values: dict[str, Value] = {"algorithm": method, "threads": 1, "workers": where.workers, "seed": seed}
            if self.settings.get("engine") == "stacked":
                values["workers"] = 1
            settled = configs.update(RunConfig(keep_last=False), {**self.settings, **values})
        chosen: dict[str, Value | None] = {**hyper, "rho": rho, "held_out": self.held_out if tuning else None}
        chosen["stack_runs"] = where.stack_runs
        config = configs.resolve(configs.update(settled, chosen))
        return dataclasses.replace(config, probe=None)

    def measured(self, config: RunConfig, arm: str) -> RunConfig:
        """Measured at five instants, sharpness also of the last model."""
        often = f"every={max(1, config.rounds // 4)},samples={self.probed}"
        probes = [f"sharpness:{often},local=no,trained=no", f"estimate:{often}"]
        probes += [f"drift:{often},full=no"] if ARMS[arm].base else []
        return dataclasses.replace(config, probe=" ".join(probes)) if self.probed else config

    def changes(self) -> list[str]:
        """Against the scale's own settings."""
        some = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in self.settings.items())
        return [f"reduction, {self.name}: {some}, for the sake of {self.seeds} seeds"] if self.paper and some else []

    def budget(self) -> str:
        if not self.tuning_seeds:
            rhos = ", ".join(f"{rho:g}" for rho in self.rhos)
            return f"no tuning, {self.name}: every arm at rho {rhos}; results: seeds 0 to {self.seeds - 1}"
        runs = len(self.tuned) * len(self.rhos) * self.tuning_seeds
        plural = "s" if self.tuning_seeds > 1 else ""
        return (
            f"tuning budget, {self.name}: {len(self.tuned)} arms x rho {', '.join(f'{rho:g}' for rho in self.rhos)} x "
            f"{self.tuning_seeds} seed{plural} (from {TUNING_SEED} on) = {runs} runs, judged on {self.held_out:,} "
            f"training images that nobody trains on, the same for every arm; results: seeds 0 to {self.seeds - 1}"
        )


@dataclass(frozen=True)
class Where:
    """What is the same for all runs of a command."""

    scale: Scale
    data_dir: str | None = None
    workers: int = 1
    stack_runs: int | None = None


@dataclass(frozen=True)
class Study:
    name: str
    shows: str
    conditions: tuple[Condition, ...]
    verdicts: bool = False
    """Whether the claims are judged; else differences and intervals are shown."""


DIGITS: dict[str, Value] = {
    "data": "digits",
    "samples": 800,
    "model": "mlp",
    "split": "dirichlet:0.1",
    "clients": 40,
    "active": 4,
    "epochs": 5,
    "batch_size": 10,
    "rounds": 150,
}
SMALL_CIFAR: dict[str, Value] = {"samples": 4000, "clients": 40, "rounds": 50, "evaluate_every": 5}
"""At cpu scale: 100 images per client as in table 2 there, but 40 clients and half the rounds; ten seeds are dear."""
FAMILIES = (
    ("fedavg", "fedsam", "fedlesam", "freesam"),
    ("scaffold", "fedgamma", "fedlesam-s", "freesam-s"),
    ("feddyn", "fedsmoo", "fedlesam-d", "freesam-d"),
)
"""A base; with SAM, at two passes; with FedLESAM's perturbation; with the previous step's."""
SPLITS: dict[str, dict[str, Value]] = {
    "Dirichlet 0.6": {"split": "dirichlet:0.6"},
    "pathological 2": {"split": "pathological:2"},
    "iid": {"split": "iid"},
}
"""With all three families; the other regimes with FedAvg's alone."""
REGIMES: dict[str, dict[str, Value]] = {
    **SPLITS,
    "full participation, 30 rounds": {"active": 40, "rounds": 30, "engine": "stacked"},
    "25 local epochs, 60 rounds": {"epochs": 25, "rounds": 60},
    "clipped at 1 after the correction": {"clip": 1.0, "clip_scope": "corrected"},
    "512 hidden units": {"model": "mlp:hidden=512"},
    "300 rounds": {"rounds": 300},
}
FINE: dict[str, dict[str, Value]] = {
    **REGIMES,
    "learning rate .01, 300 rounds": {"lr": 0.01, "rounds": 300},
    "full participation, 1 local epoch": {"active": 40, "epochs": 1, "engine": "stacked"},
    "full participation, 1 local epoch, learning rate .01, 600 rounds": {
        "active": 40,
        "epochs": 1,
        "lr": 0.01,
        "rounds": 600,
        "engine": "stacked",
    },
}
"""With what Theorem 2 asks for: small steps, few of them in a round, and all clients."""


def studies(scale: Scale, seeds: int | None = None) -> dict[str, Study]:
    """By name. At full scale digits stay as they are; `seeds` replaces the number of seeds of the results."""
    small = scale.name == "smoke"
    digits: dict[str, Value] = {**DIGITS, "rounds": 3, "epochs": 1, "model": "mlp:hidden=8"} if small else DIGITS
    few = ("fedavg", "scaffold", "fedsam", "fedlesam", "fedlesam-s", "random-round")
    main = Condition(
        "digits, Dirichlet 0.1",
        few if small else tuple(ARMS),
        (0.01, 0.1) if small else (0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
        tuning_seeds=1 if small else 3,
        seeds=seeds or (2 if small else 10),
        settings=digits,
        held_out=360,
        curve=True,
        probed=40 if small else 800,
    )
    regime = dataclasses.replace(
        main,
        rhos=(0.1,) if small else (0.03, 0.3, 1.0),
        tuning_seeds=1 if small else 2,
        seeds=seeds or (2 if small else 5),
        curve=False,
        probed=0,
    )
    regimes, fine = (
        tuple(
            dataclasses.replace(
                some,
                name=f"digits, {name}",
                arms=("fedavg", "fedlesam") if small else sum(FAMILIES if name in SPLITS else FAMILIES[:1], ()),
                settings={**digits, **changes, **({"rounds": 3} if small else {})},
            )
            for name, changes in list(every.items())[: 2 if small else None]
        )
        for some, every in ((regime, REGIMES), (dataclasses.replace(regime, rhos=main.rhos), FINE))
    )
    pictures = dataclasses.replace(
        main,
        name="CIFAR-10, Dirichlet 0.1" + (" (embedded digits in its place)" if small else ""),
        arms=("fedavg", "fedlesam") if small else (*FAMILIES[0], "random-round"),
        rhos=(0.1,) if small else (0.01, 0.03, 0.1, 0.3),
        tuning_seeds=1,
        settings=SMALL_CIFAR if scale.name == "cpu" else {},
        held_out=100 if small else 5000,
        curve=False,
        probed=40 if small else 0,  # to probe costs more than to train; figure 2 has drift and sharpness on CIFAR-10
        paper="dirichlet-0.1",
    )
    matched = dataclasses.replace(
        main,
        name="digits, Dirichlet 0.1, the same rho",
        arms=("fedavg", "fedsam", "fedlesam") if small else sum(FAMILIES, ()),
        rhos=(0.1,) if small else (0.01, 0.1, 0.3),
        tuning_seeds=0,
        seeds=seeds or (2 if small else 5),
    )
    return {
        study.name: study
        for study in (
            Study("claim", "does the claim hold? All arms over rho on digits, judged claim by claim", (main,), True),
            Study("claim-regimes", "where FedLESAM could help: splits, steps, participation", regimes),
            Study("claim-regimes-fine", "the same with six rho, and where Theorem 2 holds", fine),
            Study("claim-cifar10", "the arms that matter on CIFAR-10, judged claim by claim", (pictures,), True),
            Study("claim-sharpness", "sharpness where all arms have the same rho, and at the paper's", (matched,)),
        )
    }


NAMES = ("claim", "claim-regimes", "claim-regimes-fine", "claim-cifar10", "claim-sharpness")
