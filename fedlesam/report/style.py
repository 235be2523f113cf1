"""The colour and line of a method: the same on the page and in every picture."""

from collections import Counter

from fedlesam.runs.methods import is_centralised

OWN = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
"""Okabe and Ito's colours, which colour-blind readers can tell apart, without the yellow that vanishes on white."""

COLOURS = (*OWN, "#AA44FF", "#6B0F1A", "#99BB44", "#1A1ADB")
"""Four more for charts of more than eight methods, as far from those eight as they are from each other."""

ON_DARK = {"#000000": "#F2F2F2", "#AA44FF": "#C070FF", "#6B0F1A": "#A83240", "#99BB44": "#B7E35A", "#1A1ADB": "#5A4BFF"}
"""Replacements for colours that are hard to see on a dark page."""

GREY = "#7F7F7F"
"""The colour of centralised training, which is a reference and not a competitor."""

MARKERS = {"-": "o", "--": "s", ":": "^", "-.": "D"}
"""The marker that goes with a line, both as matplotlib writes them: points of one colour differ, too."""

LINES = tuple(MARKERS)

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
"""Methods that share a colour of `OWN`, in its order."""

FAMILY = {name: i for i, names in enumerate(FAMILIES) for name in names.split()}
FIRST = [names.split()[0] for names in FAMILIES]
"""Methods that have the same colour in every chart."""


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
    """A look for each line of a chart, in its order.

    The first method of a family has its own look; the others of the family get another colour beside it. No colour is
    used twice while one is free. After that, methods of one colour differ in line and marker, and neighbours in colour.

    Args:
        algorithms: Methods, one for each line.
    """
    names = list(dict.fromkeys(algorithms))
    own = {name: style(name, names) for name in names}
    pairs = [(colour, line) for line in LINES for colour in COLOURS]
    greys = [(GREY, line) for line in LINES]
    used: Counter[Look] = Counter()
    colours: Counter[str] = Counter()
    found: list[Look] = []
    for i, name in enumerate(algorithms):
        wish, first = own[name], name not in algorithms[:i]
        to_come = {own[other][0] for other in FIRST if other in own and other not in algorithms[: i + 1]}

        def cost(pair: Look, wish: Look = wish, kept: set[str] = to_come) -> tuple[int, int, bool, bool]:
            colour, line = pair
            beside = bool(found) and found[-1][0] == colour
            return used[pair], colours[colour] + (colour in kept), beside, line != wish[1]

        if is_centralised(name):
            look = wish if not used[wish] else min(greys, key=lambda pair: used[pair])
        else:
            look = wish if first and not colours[wish[0]] and wish[0] not in to_come else min(pairs, key=cost)
        used[look] += 1
        colours[look[0]] += 1
        found.append(look)
    return found
