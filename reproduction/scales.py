"""How much of the paper's protocol is run: all of it, what two cores can do, or just enough to see that it runs.

Every reduction and every choice where the paper is silent is text here, and is printed beside the results.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from fedlesam.data.catalogue import DOMAIN_SETS, is_domains
from fedlesam.runs import config as configs
from fedlesam.runs.config import PROTOCOL, RunConfig
from fedlesam.runs.kinds import Value
from reproduction.items import DOMAINS, Item, RunSpec

CLASSES = {"cifar10": 10, "cifar100": 100}


@dataclass(frozen=True)
class DomainScale:
    """How runs that leave a domain out are done."""

    settings: Mapping[str, Value]
    rho: float
    """Of every method that has one, where figure 4 needs no other."""
    stand_in: str = ""
    """A data set in the place of OfficeHome and DomainNet; all of its domains are left out in turn."""
    options: str = ""
    """Of the data set, e.g. size=96."""
    many: Mapping[str, Value] = field(default_factory=dict)
    """Settings where a domain is several clients, which are less often active."""
    reductions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scale:
    name: str
    about: str
    seeds: int
    rounds: int
    settings: Mapping[str, Value] = field(default_factory=dict)
    """What is not as in `PROTOCOL` and the data set's defaults."""
    stand_in: str = ""
    """A data set in the place of all others, with fewer clients."""
    fewer_clients: int = 1
    domains: DomainScale | None = None
    """None: they are left out."""
    probes: Mapping[str, str] = field(default_factory=dict)
    """Options of the probes that are not their defaults."""
    surface: str = "surface:points=51"
    theory_starts: int = 20
    """Points from which the theorems are measured."""
    reductions: tuple[str, ...] = ()


CHOICES = (
    "split: samples repeat over clients where a class runs out (`,repeat`), as in the baselines' code; "
    "the paper does not say",
    "clipping: at norm 10, after the correction (clip_scope corrected), as in the baselines' code; the paper has none",
    "active clients: exactly K, drawn without replacement",
    "augmentation of CIFAR: flip, and crop of the padded image with probability 1/2, as in the baselines' code",
    "alpha .1 (FedCM, MoFedSAM), lam .1 (FedDyn, FedSMOO, FedLESAM-D), Adam's b1 .9, b2 .99, eps .01, as in the "
    "baselines' code",
    "batches of 50 on CIFAR-10 and 20 on CIFAR-100, also with 200 clients, as the paper prints; the baselines' code, "
    "FL-Simulator, has 25 on CIFAR-10 with 200 clients in its own table",
    "rho of FedGAMMA .1 and learning rates of FedSMOO falling by .9995 as the paper prints; the baselines' code has "
    "rho .01 for FedGAMMA and .998 for FedSMOO",
    "FedLESAM: a client that was never active is not perturbed (docs/errata.md, 7)",
    "accuracy: of the last round, of the mean of the last 10 evaluations and of the best round, each beside "
    "the paper's (which says `after 800 rounds`; the baselines' code prints the best)",
    "seeds: the paper does not say how many its deviations are of",
    "centralised training: as many samples as the clients together see, in rounds of one epoch",
)

DOMAIN_CHOICES = (
    "OfficeHome and DomainNet: weight decay, decay of the learning rate and clipping as on CIFAR, images mirrored with "
    "p .5 and resized to a square; the paper names none of them, its code resizes to 256, cuts the centre of 224 and "
    "mirrors nothing",
    "OfficeHome and DomainNet: rho .01 for every method, ten times the learning rate as the paper recommends for "
    "pretrained models; it tunes rho in {.05, .01, .005, .001, .0005} and does not print what it took",
    "ViT-B/32: google/vit-base-patch32-224-in21k with a new head; the paper does not name its weights",
    "DomainNet: the images of both lists, to train on and to test on, as the paper's number of images suggests",
)
"""Of the tables that leave a domain out."""

SCALES = {
    scale.name: scale
    for scale in (
        Scale(
            "smoke",
            "seconds on the embedded digits: shows that everything runs, says nothing about the paper",
            seeds=1,
            rounds=3,
            settings={"model": "mlp:hidden=8", "epochs": 1, "batch_size": 20, "active": 0.5},
            stand_in="digits",
            fewer_clients=10,
            surface="surface:points=5,samples=100",
            theory_starts=2,
            reductions=(
                "data: the 1,437 embedded digits in the place of CIFAR-10 and CIFAR-100",
                "model: an mlp with 8 hidden units, not ResNet-18",
                "rounds: 3, not 800; 1 local epoch; batches of 20",
                "clients: a tenth of the paper's, 10 and 20; half of them are active",
                "CIFAR-100's pathological splits: 2 and 1 of 10 classes for 20 and 10 of 100",
                "OfficeHome and DomainNet: left out, no domains are embedded",
            ),
        ),
        Scale(
            "cpu",
            "a reduction that two cores can do: fewer images and rounds, a small network",
            seeds=1,
            rounds=100,
            settings={"model": "cnn", "samples": 10_000, "evaluate_every": 2},
            domains=DomainScale(
                {"model": "efficientnet-lite0", "rounds": 8, "epochs": 1, "lr": 0.05, "evaluate_every": 2},
                rho=0.05,
                stand_in="pacs",
                options="size=96,limit=30",
                many={"rounds": 20, "epochs": 2, "evaluate_every": 5},
                reductions=(
                    "OfficeHome and DomainNet: PACS in their place, four domains of 7 classes at 96 x 96 pixels, at "
                    "most 30 images of a class in a domain, always the same ones, also of the domain left out: 210 "
                    "test images, so a standard error of an accuracy is up to 3.5 points",
                    "PACS: EfficientNet-Lite0 pretrained on ImageNet (3.4 million weights, BatchNorm), not ViT-B/32 "
                    "(87 million)",
                    "PACS: 8 rounds of 1 epoch with 1 client per domain, 20 rounds of 2 epochs with 10, which is as "
                    "many samples seen; not 400 rounds of 5. Evaluated four times; their mean is over all the training",
                    "PACS: learning rate .05, not .001, since there are few steps (a first FedAvg on photo learned at "
                    ".05 and not at .01, seen on its test images); rho .05 for every method that has one, the largest "
                    "of the paper's grid, not tuned",
                ),
            ),
            probes={"sharpness": "steps=5", "drift": "samples=500"},
            surface="surface:points=21,samples=500",
            reductions=(
                "data: 10,000 of the 50,000 training images, always the same ones, classes in equal shares; "
                "100 images per client with 100 clients, 50 with 200",
                "model: a cnn of three convolutions (24,000 weights at 10 classes), not ResNet-18 (11 million)",
                "rounds: 100, not 800; so the learning rate ends higher",
                "evaluation: every second round",
            ),
        ),
        Scale(
            "full",
            "the paper's protocol, for a machine with a GPU",
            seeds=3,
            rounds=800,
            settings={"model": "resnet18"},
            domains=DomainScale({"model": "vit-b32", "rounds": 400, "lr": 0.001}, rho=0.01),
        ),
    )
}

EVERYWHERE: dict[str, Value] = {"lr": 0.1, "weight_decay": 1e-3, "clip": 10.0, "clip_scope": "corrected"}
"""If not said otherwise; epochs and batch size follow the data set, lr decay, alpha, lam and CIFAR's rho the method."""


def on_scale(item: Item, scale: Scale) -> Item:
    """With the stand-in's domains where the paper's data sets with domains are."""
    if scale.domains is None or not scale.domains.stand_in:
        return item
    name = scale.domains.stand_in
    specs = [
        some
        for spec in item.specs
        for some in (
            (dataclasses.replace(spec, data=name, split=target) for target in DOMAIN_SETS[name].domains)
            if spec.data in DOMAINS
            else (spec,)
        )
    ]
    return dataclasses.replace(item, specs=tuple(dict.fromkeys(specs)))


def settle(spec: RunSpec, scale: Scale, seed: int, data_dir: str | None, workers: int) -> RunConfig | str:
    """The settings of a run, all resolved; or why there can be none."""
    values = _domains(spec, scale) if is_domains(spec.data) else _cifar(spec, scale, data_dir)
    if isinstance(values, str):
        return values
    values = {"data_dir": data_dir, **values, "algorithm": spec.method, "seed": seed, "workers": workers, "threads": 1}
    if spec.ratio is not None:
        values["rho"] = float(f"{spec.ratio * float(values['lr'] or 0):.6g}")
    config = configs.resolve(configs.update(RunConfig(keep_last=False), values))
    return dataclasses.replace(config, probe=_probes(spec, scale, config.rounds))


def _cifar(spec: RunSpec, scale: Scale, data_dir: str | None) -> dict[str, Value | None]:
    data = scale.stand_in or spec.data
    values: dict[str, Value | None] = {
        **EVERYWHERE,
        **{name: value for name, value in PROTOCOL[spec.data].items() if name != "clients"},
        "active": spec.active,
        **scale.settings,
        "data": data,
        "data_dir": None if scale.stand_in else data_dir,
        "split": _split(spec, scale),
        "clients": spec.clients // scale.fewer_clients,
        "rounds": scale.rounds,
    }
    if spec.split == "pooled":
        seen = scale.rounds * int(values["epochs"] or 1) * spec.active
        values |= {"clients": None, "active": 1.0, "epochs": 1, "rounds": max(1, round(seen))}
    return values


def _domains(spec: RunSpec, scale: Scale) -> dict[str, Value | None] | str:
    from fedlesam import algorithms

    if scale.domains is None:
        return "no domains are embedded"
    several = spec.clients > 1
    return {
        **EVERYWHERE,
        **PROTOCOL["domains"],
        "active": spec.active,
        **scale.domains.settings,
        **(scale.domains.many if several else {}),
        "data": ":".join(filter(None, (spec.data, scale.domains.options))),
        "split": f"leave-out:{spec.split}" + (f",{spec.clients}" if several else ""),
        "rho": scale.domains.rho if "rho" in algorithms.hyperparameters(spec.method) else None,
    }


def _probes(spec: RunSpec, scale: Scale, rounds: int) -> str | None:
    """At eleven instants, the first and the last model among them."""
    options = {name: [f"every={max(1, rounds // 10)}", *filter(None, [scale.probes.get(name)])] for name in spec.probes}
    return " ".join(f"{name}:{','.join(some)}" for name, some in options.items()) or None


def _split(spec: RunSpec, scale: Scale) -> str:
    name, _, number = spec.split.partition("-")
    if name == "pooled":
        return name
    if name == "pathological" and scale.stand_in:
        number = str(max(1, round(int(number) * 10 / CLASSES[spec.data])))
    return f"{name}:{number},repeat"
