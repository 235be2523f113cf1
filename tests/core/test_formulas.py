"""Every rule of the catalogue has its formula, in symbols that are explained, and methods compose them."""

import re
from dataclasses import dataclass, fields

import pytest
from torch import Tensor

import fedlesam as fl
from fedlesam.algorithms import CATALOGUE, example
from fedlesam.core.formulas import NOTATION, equations, formula_of, latex
from fedlesam.core.slots import Step
from fedlesam.rules import LocalAscent
from fedlesam.runs.explain import ERRATA, explain

SYMBOLS = {word for key in NOTATION for word in re.findall(r"[A-Za-z]\w*", key)} - {"x"}
STATE = {
    "c",
    "m",
    "s",
    "h",
    "H",
    "mu",
    "a",
    "b",
    "M",
    "T",
    "G",
    "q",
    "r",
    "rho_t",
    "j",
    "lr",
    "w_a",
    "w_b",
    "p",
    "z_t",
    "z_v",
    "z_w",
    "L",
}


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_rule_has_a_formula_of_known_symbols(name: str) -> None:
    for rule in example(name).rules:
        assert rule.formula, rule
        assert formula_of(rule) == list(rule.formula), "nothing that it computes is inherited from another formula"
        for line in rule.formula:
            math = re.sub(r"^(client|server|start): ", "", line)
            known = SYMBOLS | STATE | {field.name for field in fields(rule)}
            for word in re.findall(r"[A-Za-z]\w*", math):
                single = len(word) <= 2 or "_" in word
                assert not single or word in known or word.removesuffix("_i") in known or word in WORDS, (line, word)


WORDS = {"a", "at", "by", "in", "is", "of", "on", "or", "to", "KL", "each", "1e"}


@pytest.mark.parametrize("name", CATALOGUE)
def test_latex_is_balanced_and_text_is_complete(name: str) -> None:
    found = equations(example(name))
    text, tex = found.text(), found.latex()
    assert text.count("(") == text.count(")") and tex.count("{") == tex.count("}")
    assert re.sub(r"\\[lr]v?Vert|\\[lr]vert", "", tex).count("(") == tex.count(")")
    assert found.step[-1].startswith("v <- v - lr") and any(line.startswith("w <- ") for line in found.server)


def test_known_methods() -> None:
    fedavg = equations(fl.algorithms.fedavg())
    assert fedavg.step == ["g = gradient of the loss at v", "g <- clip(g)", "v <- v - lr (g + weight_decay v)"]
    assert equations(fl.algorithms.fednsam()).start == "w' = w + gamma m"
    assert "v - w' + h_i" in equations(fl.algorithms.fedgloss()).step[-1]
    assert equations(fl.algorithms.fedlesam(direction="ahead")).step[0].startswith("e = -rho")


@dataclass(frozen=True)
class Own(LocalAscent):
    """Against the gradient."""

    def ascend(self, gradient: Tensor, step: Step) -> Tensor:
        return super().ascend(gradient, step).neg_()


@dataclass(frozen=True)
class Said(Own):
    formula = ("e = -rho u(g0)",)


def test_a_rule_of_ones_own() -> None:
    assert formula_of(Own()) == ["Against the gradient."], "LocalAscent's formula would be wrong"
    assert equations(fl.Algorithm(Said())).step[0] == "e = -rho u(g0)"


def test_latex() -> None:
    assert latex("e = rho (w_old - w) / norm(w_old - w)") == (
        r"e = \rho (w_{\mathrm{old}} - w) / \lVert w_{\mathrm{old}} - w \rVert"
    )
    assert latex("b <- b + sqrt(d^2)") == r"b \leftarrow b + \sqrt{d ^2}"


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_method_says_where_it_is_from(name: str) -> None:
    about = explain(name).summary
    assert re.search(r" et al\., | and Yoon, |^A (control|placebo): |in no paper|et al\. \(", about), about


def test_an_explanation_is_counted_and_read_from_the_code() -> None:
    found = explain("fedgf")
    assert found.parameters == {"rho": 0.05, "rho_g": 0.05, "window": 30, "threshold": None}
    assert found.cost.passes == 2 and "Rethinking the Flat Minima" in found.text()
    assert explain("fedsam", rho=0.3).algorithm == fl.algorithms.fedsam(rho=0.3)
    assert r"\begin{align*}" in found.text(latex=True)


def test_an_explanation_names_what_was_released() -> None:
    assert explain("fednsam").released.startswith("fednsam-released. A control: FedNSAM")
    assert explain("fedlesam-s").released.startswith("fedlesam-released-s. ")
    assert "What was released differs: fedsmoo-released" in explain("fedsmoo").text()
    assert explain("fedavg").released == "" and explain("fedlesam-released").released == ""


def test_a_notebook_shows_equations() -> None:
    assert r"\begin{aligned}" in fl.algorithms.fedsam()._repr_markdown_()


def test_a_number_of_errata_comes_with_the_address_of_the_page() -> None:
    assert "(errata 9)" in explain("fedsmoo").text() and explain("fedsmoo").text().endswith(f"Errata: {ERRATA}")
    assert "rrata" not in explain("fedavg").text()
