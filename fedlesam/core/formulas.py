"""A method's equations, composed from the formulas that its rules carry, as text or LaTeX."""

import inspect
import re
from typing import NamedTuple

from fedlesam.core.slots import Algorithm, Rule
from fedlesam.core.vectors import is_number

NOTATION = {
    "w, w_old": "the global model, and the one this client received before",
    "v": "a client's local model",
    "g0, g_prev": "the loss gradient of the batch at v, and that of the client's previous step",
    "g": "the loss gradient of the batch at v + e, clipped",
    "e": "the perturbation",
    "u(x)": "x / (norm(x) + 1e-7), over all weights together",
    "d_i, d": "a client's update v - w at the end of its round, and the mean over those that answered",
    "lr": "the learning rate of the round; after a client's steps the mean of those that its steps had",
    "k, E_i, E": "the number of a step from 0, a client's steps, and their mean",
    "K, N": "the clients that answered, and all clients",
    "t": "the number of the round",
}

PARAMETERS = {
    "rho": "the norm of e",
    "lr_g": "the server's learning rate, a factor of d",
    "alpha": "the share of the client's own gradient in a step; in fedspeed the share of the gradient at v + e",
    "lam": "the strength of the dynamic regulariser",
    "prox": "the strength of the pull towards w",
    "beta": "the share of the old value in a moving average",
    "gamma": "the server's momentum; in fedmoswa the share of the new value in m",
    "b1": "the share of the old value in the server's first moment",
    "b2": "the share of the old value in the server's second moment",
    "eps": "added to the root of the second moment",
    "reference": "w_old is the model that this client received before, or the global model of the round before",
    "direction": "back, against the last progress of the global model, or ahead, along it",
    "eta": "added to abs(v) in the scale of a weight",
    "rho_g": "the norm of the global ascent",
    "rho_s": "the norm of the server's shift of the start of a round",
    "window": "the rounds that count for c",
    "threshold": "the mean norm of updates above which a round counts for c",
    "warmup": "the rounds in which rho and rho_s grow; 0 for none",
    "floor": "what is left of the learning rate at the last step of a client's round",
    "strength": "the weight of the distance to the teacher's predictions in the loss",
    "tau": "the temperature of both predictions",
    "adaptive": "whether e is scaled by how far each weight has moved",
    "clip": "the largest norm of a client's update",
    "noise": "the noise on the sum of updates, in units of clip",
    "delta": "the delta for which epsilon is computed; 0 stands for 1 / N",
    "pool": "the earlier global models from which two are drawn",
    "scale": "a factor of the correction",
}
"""What the hyper-parameters of the catalogue mean."""
"""The symbols of formulas. All other names are parameters or state of a rule; an index i is a client's own."""

GREEK = {name: f"\\{name}" for name in ("alpha", "beta", "gamma", "delta", "eta", "mu", "rho", "tau")}
GREEK |= {"lam": "\\lambda", "eps": "\\epsilon"}
FUNCTIONS = {"norm": ("\\lVert ", " \\rVert"), "abs": ("\\lvert ", " \\rvert"), "sqrt": ("\\sqrt{", "}")}
OPERATORS = ("min", "max", "mean", "clip", "sign", "cos", "log", "KL", "softmax")
COMPUTES = {"ascend", "round_perturbation", "prepare", "next_client_state", "start", "step", "aggregate"}
"""The methods of a rule whose formula this is."""
WORD = re.compile(r"[A-Za-z]+[A-Za-z0-9]*(?:_[A-Za-z0-9]+)*'?|1e-\d+|<-|.", re.DOTALL)


class Equations(NamedTuple):
    """What a method computes, in the order in which it happens."""

    start: str
    """Where a client starts."""
    step: list[str]
    """A local step."""
    client: list[str]
    """What a client does with its state after its steps."""
    server: list[str]
    """What the server does with the mean update."""

    def text(self) -> str:
        """As plain text."""
        parts = [
            f"Every active client starts at v = {self.start} and does this for every batch:",
            *(f"    {line}" for line in self.step),
            f"It sends d_i = v - {self.anchor}{', and sets' if self.client else '.'}",
            *(f"    {line}" for line in self.client),
            "The server takes the mean d of the d_i and sets",
            *(f"    {line}" for line in self.server),
        ]
        return "\n".join(parts)

    @property
    def anchor(self) -> str:
        """What a client is sent: w, or w' where the server shifts the start."""
        return self.start.partition(" ")[0]

    def latex(self) -> str:
        """As the lines of an `align*` environment."""
        rows = [
            ("start", [f"v = {self.start}"]),
            ("every batch", self.step),
            ("client, at the end", [f"d_i = v - {self.anchor}", *self.client]),
            ("server", self.server),
        ]
        lines = [f"&{latex(line)} && \\text{{{who}}}" for who, found in rows for line in found]
        return "\\begin{align*}\n" + " \\\\\n".join(lines) + "\n\\end{align*}"


def equations(algorithm: Algorithm) -> Equations:
    """The equations of a method.

    Args:
        algorithm: The method.
    """
    look, turn, land = (formula_of(rule) for rule in (algorithm.perturbation, algorithm.correction, algorithm.server))
    shift = _with("start: ", land)
    if shift:
        look, turn = ([re.sub(r"\bw\b", "w'", line) for line in lines] for lines in (look, turn))
    direction = (_with("direction = ", turn) or ["g"])[0]
    mixed = [line for line in look if line.startswith("g <-")]
    perturbs = "e = 0" not in look
    falls = not is_number(algorithm.lr_floor, 1)
    step = [
        *([f"lr_k = lr ((1 - k / E_i) + {algorithm.lr_floor:g} k / E_i)"] if falls else []),
        *(line for line in look if line not in ("e = 0", *mixed) and not line.startswith(("client: ", "server: "))),
        f"g = gradient of the loss at v{' + e' if perturbs else ''}",
        *mixed,
        "g <- clip(g)",
        f"v <- v - {'lr_k' if falls else 'lr'} ({direction} + weight_decay v)",
    ]
    return Equations(
        f"w' = {shift[0]}" if shift else "w",
        step,
        _with("client: ", [*look, *turn]),
        [*_with("server: ", [*look, *turn]), *(line for line in land if not line.startswith("start: "))],
    )


def _with(prefix: str, lines: list[str]) -> list[str]:
    return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]


def formula_of(rule: Rule) -> list[str]:
    """The formula of a rule. One without, or that changes what an inherited one says, has its docstring's first line.

    Args:
        rule: A rule of any slot.
    """
    for base in type(rule).__mro__:
        if "formula" in vars(base) and rule.formula:
            return list(rule.formula)
        if COMPUTES & vars(base).keys():
            break
    return [(inspect.getdoc(type(rule)) or type(rule).__name__).splitlines()[0]]


def latex(line: str) -> str:
    """A line of a formula as LaTeX.

    Args:
        line: In the notation of formulas.
    """
    found, words = "", ""
    closers: list[str] = []

    def flush() -> None:
        nonlocal found, words
        if words.strip():
            found += f"\\text{{{words}}}"
        else:
            found += words
        words = ""

    tokens = WORD.findall(line)
    for number, token in enumerate(tokens):
        called = tokens[number + 1] == "(" if number + 1 < len(tokens) else False
        if token in FUNCTIONS and called:
            flush()
            found += FUNCTIONS[token][0]
            closers.append(FUNCTIONS[token][1])
        elif token == "(":
            flush()
            if number and tokens[number - 1] in FUNCTIONS:
                continue
            found += token
            closers.append(")")
        elif token == ")":
            flush()
            found += closers.pop() if closers else token
        elif (symbol := _symbol(token, called)) is not None:
            flush()
            found += symbol
        else:
            words += token
    flush()
    return re.sub(r" +(?=[),. ])", "", found).strip()


def _symbol(token: str, called: bool) -> str | None:
    """A token of a formula in LaTeX; None for a word of a sentence."""
    if token == "<-":
        return "\\leftarrow "
    if token.startswith("1e-"):
        return f"10^{{-{token.removeprefix('1e-')}}}"
    if not token[0].isalpha():
        return None if token == " " else token
    if token in OPERATORS and called:
        return f"\\operatorname{{{token}}}"
    if token.endswith("'"):
        return f"{token} "
    base, *index = token.split("_")
    if base in GREEK or len(base) == 1 or re.fullmatch(r"[a-z]\d", base) or index or base == "lr":
        shown = GREEK.get(base) or (base if len(base) == 1 else f"{base[0]}_{base[1]}" if base[1].isdigit() else "")
        shown = shown or f"\\mathrm{{{base}}}"
        below = ",".join(part if len(part) == 1 else f"\\mathrm{{{part}}}" for part in index)
        return f"{shown}_{{{below}}}" if below else f"{shown} "
    return None
