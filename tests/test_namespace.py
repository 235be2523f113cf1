"""`fl.data`, `fl.models` and `fl.probes` can be explored: every name is there and documents its arguments."""

import inspect
import subprocess
import sys
from types import ModuleType

import pytest

import fedlesam as fl
from fedlesam.core.formulas import PARAMETERS
from fedlesam.runs.explain import explain

ROOMS = [fl.data, fl.models, fl.probes]


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__)
def test_every_name_is_documented(room: ModuleType) -> None:
    assert dir(room) == sorted(room.__all__)
    for name in room.__all__:
        found = getattr(room, name)
        if not callable(found):
            continue
        text = inspect.getdoc(found) or ""
        wanted = [key for key in inspect.signature(found).parameters if key != "self"]
        missing = [key for key in wanted if f"{key}:" not in text]
        assert not missing, f"{room.__name__}.{name} does not document {', '.join(missing)}"


def test_every_hyper_parameter_has_a_meaning() -> None:
    takes = {key for name in fl.algorithms.CATALOGUE for key in fl.algorithms.hyperparameters(name)}
    assert set(PARAMETERS) == takes
    assert ": the norm of e\n" in explain("fedsam").text()


def test_what_is_at_the_top() -> None:
    assert {"Federation", "LocalTraining", "load_run", *(room.__name__.split(".")[-1] for room in ROOMS)} <= set(
        dir(fl)
    )
    for name in fl.__all__:
        assert inspect.getdoc(getattr(fl, name)), name
    assert "path:" in (fl.load_run.__doc__ or "")


def test_an_unknown_name() -> None:
    for room in ROOMS:
        with pytest.raises(AttributeError, match=f"{room.__name__}' has no attribute 'nothing'"):
            room.nothing  # noqa: B018


def test_a_model_and_a_split() -> None:
    data = fl.data.load("digits")
    model = fl.models.cnn(data.shape, classes=len(data.classes))
    split = fl.data.split("dirichlet:0.3", data.train.y, clients=50, seed=0)
    first = split.clients[0]
    assert model(data.normalise(data.train.x[first])).shape == (len(first), 10)


def test_the_rooms_are_cheap() -> None:
    """No PyTorch before it is needed; and its compiler, which takes as long to import, only to compile."""
    look = "import sys, fedlesam as fl; dir(fl.data), dir(fl.models), fl.data.NAMES; print('torch' in sys.modules)"
    make = "import fedlesam.runs.runner; print('torch' in sys.modules, 'torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", f"{look}; {make}"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "False"]
