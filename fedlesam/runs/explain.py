"""A method for readers: its equations, parameters, costs and papers, all read from the code."""

import inspect
from dataclasses import dataclass
from typing import Any

from fedlesam import algorithms
from fedlesam.algorithms import Algorithm
from fedlesam.core.formulas import NOTATION, PARAMETERS, Equations, equations
from fedlesam.runs import costs
from fedlesam.runs.costs import Cost

ERRATA = "https://github.com/fedlesam/fedlesam/blob/main/docs/errata.md"
"""What the numbers of errata in docstrings refer to."""

SLOTS = {
    "perturbation": "Perturbation (where to look)",
    "correction": "Correction (how to turn)",
    "server": "Server rule (how to land)",
}


@dataclass(frozen=True)
class Explanation:
    """What is known about a method."""

    name: str
    """Of the catalogue, or `module:callable`."""
    summary: str
    """What its maker's docstring says."""
    algorithm: Algorithm
    """The method, with its hyper-parameters."""
    parameters: dict[str, Any]
    """Hyper-parameters and their defaults; None where one has to be given."""
    equations: Equations
    """What it computes."""
    cost: Cost
    """Backward passes, and vectors that are sent and held."""

    @property
    def rules(self) -> dict[str, tuple[str, str]]:
        """For every slot the rule, and what its docstring says: its paper, and where released code differs."""
        found = {slot: getattr(self.algorithm, slot) for slot in SLOTS}
        return {slot: (repr(rule), inspect.getdoc(type(rule)) or "") for slot, rule in found.items()}

    @property
    def released(self) -> str:
        """The control that computes what was released, where that is not the paper's method, and what it is."""
        names = (f"{self.name}-released", self.name.replace("fedlesam", "fedlesam-released"))
        known = [name for name in names if name in algorithms.CATALOGUE and name != self.name]
        return f"{known[0]}. {inspect.getdoc(algorithms.find(known[0]))}" if known else ""

    def text(self, latex: bool = False) -> str:
        """All of it.

        Args:
            latex: The equations as LaTeX.
        """
        given = [
            f"    {key} = {'(must be given)' if v is None else v}{_meaning(key)}" for key, v in self.parameters.items()
        ]
        cost = self.cost
        parts = [
            f"{self.name}: {self.summary}" if self.summary else self.name,
            self.equations.latex() if latex else self.equations.text(),
            "\n".join(["Parameters:" if given else "Parameters: none", *given]),
            f"The learning rate is multiplied by {self.algorithm.lr_decay:g} after every round.",
            f"Backward passes per step: {cost.passes:g}. Vectors of the model's size: a client receives {cost.down:g}, "
            f"sends {cost.up:g} and holds {cost.stored:g} between its rounds; the server holds {cost.server:g}.",
            *([f"What was released differs: {self.released}"] if self.released else []),
            *(f"{SLOTS[slot]}: {rule}\n{_indented(doc)}" for slot, (rule, doc) in self.rules.items()),
            "Symbols: " + "; ".join(f"{symbol}: {meaning}" for symbol, meaning in NOTATION.items()) + ".",
        ]
        if any("(errata " in part for part in parts):
            parts.append(f"Errata: {ERRATA}")
        return "\n\n".join(parts)


def explain(name: str, **hyper: Any) -> Explanation:
    """What is known about a method of the catalogue, or of one's own as `module:callable`.

    Args:
        name: The method.
        hyper: Its hyper-parameters, where they are not the defaults.
    """
    algorithm = algorithms.get(name, **{**algorithms.examples(name), **hyper})
    takes = {k: None if v is inspect.Parameter.empty else v for k, v in algorithms.hyperparameters(name).items()}
    summary = " ".join((inspect.getdoc(algorithms.find(name)) or "").split())
    return Explanation(name, summary, algorithm, {**takes, **hyper}, equations(algorithm), costs.measure(algorithm))


def _meaning(parameter: str) -> str:
    """What a hyper-parameter of the catalogue is; nothing for one of a method of one's own."""
    return f": {PARAMETERS[parameter]}" if parameter in PARAMETERS else ""


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())
