"""The colour and line of a method: the same on the page and in every picture."""

from fedlesam.runs.methods import is_centralised

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
"""Okabe and Ito's colours, which colour-blind readers can tell apart, less the yellow that vanishes on white."""

ON_DARK = {"#000000": "#F2F2F2"}
"""Where a dark page would swallow a colour."""

GREY = "#7F7F7F"
"""Of centralised training, which is no competitor but what a federation is measured by."""

LINES = ("-", "--", ":", "-.")
"""As matplotlib writes them."""

Look = tuple[str, str]

FAMILIES = (
    "fedavg fedprox freesam-d fedlesam-released",
    "fedlesam fedadam random-round",
    "scaffold freesam fedlesam-released-s",
    "fedsam fedlesam-m random-step",
    "fedlesam-s fedcm mofedsam",
    "fedgamma fedlesam-d",
    "feddyn freesam-s fedlesam-released-d",
    "fedsmoo",
)
"""Methods that share a colour of `COLOURS`, in its order."""

FAMILY = {name: i for i, names in enumerate(FAMILIES) for name in names.split()}


def style(algorithm: str, taken: list[str]) -> Look:
    """Colour and line of a method; one that is not of the catalogue gets a free colour.

    Perturbations without extra computation are dashed: their curves often lie on top of their base's.

    Args:
        algorithm: The method.
        taken: All methods of the comparison.
    """
    if is_centralised(algorithm):
        return GREY, {"SGD": "-", "SAM": "--"}.get(algorithm.split()[1], ":")
    if algorithm in FAMILY:
        lines = {"fedlesam": "--", "freesam": ":", "random": ":", "fedprox": "-.", "mofedsam": "-."}
        return COLOURS[FAMILY[algorithm]], lines.get(algorithm.partition("-")[0], "-")
    others = [name for name in taken if name not in FAMILY and not is_centralised(name)]
    used = {FAMILY[name] for name in taken if name in FAMILY}
    left = [colour for i, colour in enumerate(COLOURS) if i not in used] or list(COLOURS)
    return left[others.index(algorithm) % len(left)], "-"


def looks(algorithms: list[str]) -> list[Look]:
    """A look for each line of a chart: that of its method if it is free, else another, a new colour first.

    Args:
        algorithms: Methods, one for each line.
    """
    names = list(dict.fromkeys(algorithms))
    own = {name: style(name, names) for name in names}
    taken = {own[name] for name in names if name in FAMILY}
    colours = {colour for colour, _ in own.values()}
    pairs = [(colour, line) for line in LINES for colour in COLOURS]
    spare = sorted((p for p in pairs if p not in own.values()), key=lambda pair: pair[0] in colours)
    greys = [(GREY, line) for line in LINES if (GREY, line) not in own.values()]
    found = []
    for i, name in enumerate(algorithms):
        look, again = own[name], name in algorithms[:i]
        if again or (name not in FAMILY and not is_centralised(name) and look in taken):
            free = greys if is_centralised(name) else spare
            look = free.pop(0) if free else look
        taken.add(look)
        found.append(look)
    return found
