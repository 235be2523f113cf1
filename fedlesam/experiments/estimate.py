"""What a run will take, before it is run."""

from fedlesam.config import PROTOCOL, RunConfig
from fedlesam.data.domain_sets import DOMAIN_SETS, is_domains, parse
from fedlesam.experiments.items import Ask
from fedlesam.experiments.paper import tables
from fedlesam.experiments.scales import Scale

PER_SAMPLE = {
    "mlp": 5e-6,
    "cnn": 4.2e-4,
    "lenet": 1.2e-3,
    "resnet18": 1e-2,
    "efficientnet-lite0": 2.04e-2,
    "vit-b32": 8e-2,
}
"""Seconds of one core for a forward and a backward pass of one training sample, measured on CIFAR-10 (mlp: digits,
efficientnet: PACS at 96 x 96, vit: not measured, by its multiplications)."""
STEP = 5e-4
"""Of a local step, whatever its batch: what counts where the model is tiny."""
FORWARD = 0.55
"""Evaluation of a sample against that: a forward pass, gathering and normalising."""
START = 0.15
"""Building a run and writing its folder."""
SAMPLES = {"digits": (1437, 360), "cifar10": (50_000, 10_000), "cifar100": (50_000, 10_000)}
DOMAIN_SAMPLES = {"pacs": 9_991, "officehome": 15_588, "domainnet": 586_575}
TIMES_RESNET = 7.9
"""Multiplications of ViT-B/32 at 224 x 224 for one of ResNet-18 at 32 x 32: 4.4 and .56 billion per image."""
PER_ROUND = 25_000
"""Samples that the clients of table 8 train on in a round."""
TWICE = ("fedsam", "mofedsam", "fedgamma", "fedsmoo")
"""Two backward passes per step."""


def seconds(config: RunConfig) -> float:
    """Of one core. A guess where the model or the data set is not known."""
    known = SAMPLES.get(config.data, SAMPLES["cifar10"])
    train, test = _domain_samples(config.data) if is_domains(config.data) else known
    train = config.samples or train
    per = PER_SAMPLE.get(config.model.partition(":")[0], PER_SAMPLE["cnn"])
    active = config.active if isinstance(config.active, float) else config.active / (config.clients or 1)
    epochs = config.epochs if isinstance(config.epochs, int) else 5
    passes = 2 if config.algorithm in TWICE else 1
    seen = config.rounds * active * train * epochs * passes
    training = seen * (per + STEP / (config.batch_size or 50))
    return START + training + config.rounds / config.evaluate_every * test * per * FORWARD


def _domain_samples(data: str) -> tuple[float, float]:
    """To train on and to test on, of a domain of mean size."""
    request = parse(data)
    known = request.known or DOMAIN_SETS["pacs"]
    one = DOMAIN_SAMPLES[known.name] / len(known.domains)
    if request.limit is not None:
        one = min(one, request.limit * known.classes)
    return one * (len(known.domains) - 1), one


def gpu_seconds(ask: Ask, scale: Scale) -> float:
    """At full scale, from table 8 (an RTX 3090); methods not in it cost what their like does.

    ViT-B/32 is not in it either: as ResNet-18, by samples and multiplications.
    """
    printed = tables()["table8"].parts["time"]
    like = {"fedadam": "fedavg", "scaffold": "fedlesam-s", "fedcm": "fedlesam-s", "feddyn": "fedlesam-d"}
    figure, _ = printed[like.get(ask.method, ask.method)][0]
    if not is_domains(ask.data) or scale.domains is None:
        return float(figure) * scale.rounds
    samples = _domain_samples(ask.data)[0] * ask.active * float(PROTOCOL["domains"]["epochs"])
    return float(figure) * float(scale.domains.settings["rounds"]) * TIMES_RESNET * samples / PER_ROUND


def spoken(seconds: float) -> str:
    """For people: one significant place is all there is."""
    for limit, unit, word in ((90, 1, "s"), (5400, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {word}"
    return f"{seconds / 86400:.0f} days"
