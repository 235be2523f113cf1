"""The paper's tables and figures, and the runs each of them shows. Imports no PyTorch."""

from dataclasses import dataclass, replace
from typing import Literal

from fedlesam.data.catalogue import is_domains
from reproduction.paper import paper_tables

Kind = Literal[
    "methods", "accuracy", "gain", "target", "data", "cost", "clock", "surface", "drift", "ablation", "heat", "theory"
]

DOMAINS = ("officehome", "domainnet")
"""Data sets of which one domain is left out to test on; the split is that domain."""

METHODS = tuple(paper_tables()["table2"].parts["100 clients, 10% active"])
SETTINGS = {"100 clients, 10% active": (100, 0.1), "200 clients, 5% active": (200, 0.05)}
DOMAIN_SETTINGS = {"1 client per domain, 100% active": (1, 1.0), "10 clients per domain, 20% active": (10, 0.2)}
RATIOS = {"cifar10": (0.01, 0.1, 1.0, 10.0), "cifar100": (0.01, 0.1, 1.0, 10.0)} | dict.fromkeys(
    DOMAINS, (0.01, 0.1, 1.0, 10.0, 100.0)
)
"""rho / lr in figure 4. Its axis is known only from the text: for the domains wider than 10e-2 to 10e2."""


@dataclass(frozen=True)
class RunSpec:
    """One run of the paper's protocol, before a scale makes it smaller."""

    method: str
    data: str
    split: str
    """dirichlet-0.1, pathological-3, pooled (centralised training), or the domain left out."""
    clients: int
    """Per domain, where there are domains."""
    active: float
    ratio: float | None = None
    """rho / lr, where it is not the protocol's rho."""
    probes: tuple[str, ...] = ()
    """What is measured while it trains."""

    @property
    def column(self) -> str:
        return f"{self.data}/{self.split}"

    @property
    def plain(self) -> "RunSpec":
        return replace(self, probes=())

    @property
    def label(self) -> str:
        ratio = f", rho/lr {self.ratio:g}" if self.ratio is not None else ""
        clients = f"{self.clients} client{'s' if self.clients > 1 else ''}"
        each = " per domain" if is_domains(self.data) else ""
        return f"{self.method} {self.column}, {clients}{each}{ratio}"


@dataclass(frozen=True)
class Item:
    name: str
    kind: Kind
    shows: str
    specs: tuple[RunSpec, ...] = ()
    part: str = ""
    """The part of the table `name` in paper.toml, where it has only one."""

    @property
    def trained(self) -> tuple[RunSpec, ...]:
        return tuple(dict.fromkeys(spec.plain for spec in self.specs))


def _cells(
    table: str, settings: dict[str, tuple[int, float]], methods: tuple[str, ...] = METHODS
) -> tuple[RunSpec, ...]:
    return tuple(
        RunSpec(method, data, split, clients, active)
        for clients, active in settings.values()
        for data, split in (column.split("/") for column in paper_tables()[table].columns)
        for method in methods
    )


def _cifar10(split: str, *methods: str, probes: tuple[str, ...] = ()) -> tuple[RunSpec, ...]:
    return tuple(RunSpec(method, "cifar10", split, 100, 0.1, probes=probes) for method in methods)


def _ablation() -> tuple[RunSpec, ...]:
    """FedLESAM-S over rho, FedAvg beside it, on the splits of tables 2 and 3 with fewer clients."""
    specs: list[RunSpec] = []
    for columns, (clients, active) in (
        (paper_tables()["table2"].columns, SETTINGS["100 clients, 10% active"]),
        (paper_tables()["table3"].columns, DOMAIN_SETTINGS["1 client per domain, 100% active"]),
    ):
        for column in columns:
            data, split = column.split("/")
            specs.append(RunSpec("fedavg", data, split, clients, active))
            specs += [RunSpec("fedlesam-s", data, split, clients, active, ratio) for ratio in RATIOS[data]]
    return tuple(specs)


def _rows(name: str) -> tuple[str, ...]:
    (rows,) = paper_tables()[name].parts.values()
    return tuple(rows)


_DRIFT = ("fedsam", "mofedsam", "fedgamma", "fedsmoo", "fedlesam", "fedlesam-s", "fedlesam-d")

ITEMS = {
    item.name: item
    for item in (
        Item("table1", "methods", "the SAM methods: base, target, perturbation, extra computation", part="methods"),
        Item(
            "table2",
            "accuracy",
            "test accuracy on CIFAR-10/100, 8 splits, 100 and 200 clients",
            _cells("table2", SETTINGS),
        ),
        Item(
            "table3",
            "accuracy",
            "accuracy on the domain left out, OfficeHome and DomainNet",
            _cells("table3", DOMAIN_SETTINGS),
        ),
        Item(
            "table4",
            "gain",
            "average gain of FedLESAM over FedAvg, SCAFFOLD and FedDyn on the four data sets",
            _cells("table2", SETTINGS, _rows("table4")) + _cells("table3", DOMAIN_SETTINGS, _rows("table4")),
            "average",
        ),
        Item(
            "table5",
            "target",
            "rounds, communication and time to a target accuracy, Dirichlet 0.1",
            _cifar10("dirichlet-0.1", *_rows("table5")),
            "cost",
        ),
        Item("table6", "data", "the data sets: images, classes, domains, size", part="data"),
        Item("table7", "cost", "memory, communication and backward passes against FedAvg", part="cost"),
        Item("table8", "clock", "seconds per round", _cifar10("dirichlet-0.1", *_rows("table8")), "time"),
        Item(
            "table9",
            "target",
            "rounds, communication and time to a target accuracy, Pathological 3",
            _cifar10("pathological-3", *_rows("table9")),
            "cost",
        ),
        Item(
            "fig1",
            "surface",
            "loss surfaces: centralised training, Dirichlet 0.6 and 0.06",
            _cifar10("pooled", "fedavg") + _cifar10("dirichlet-0.6", "fedavg") + _cifar10("dirichlet-0.06", "fedavg"),
        ),
        Item(
            "fig2",
            "drift",
            "perturbation drift and global sharpness over rounds, centralised training beside it",
            _cifar10("dirichlet-0.1", "fedavg", probes=("sharpness", "estimate"))
            + _cifar10("dirichlet-0.1", *_DRIFT, probes=("drift", "sharpness", "estimate"))
            + _cifar10("pooled", "fedavg", "fedsam", probes=("sharpness",)),
        ),
        Item(
            "fig3",
            "surface",
            "loss surfaces of the methods, Dirichlet 0.1",
            _cifar10("dirichlet-0.1", "fedavg", "fedsam", "fedgamma", "fedsmoo", "fedlesam-d"),
        ),
        Item("fig4", "ablation", "accuracy over rho/lr, FedLESAM-S and FedAvg, all data sets", _ablation()),
        Item("fig5", "heat", "samples per class and client, Dirichlet 0.6 and 0.1, 100 and 200 clients"),
        Item(
            "fig6",
            "surface",
            "loss surfaces of the methods, Pathological 3",
            _cifar10("pathological-3", "fedavg", "fedsam", "fedgamma", "mofedsam", "fedsmoo", "fedlesam-d"),
        ),
        Item("theory", "theory", "Theorem 2, and Delta of Theorem 1, on quadratic losses with known constants"),
    )
}
"""In the paper's numbering."""
