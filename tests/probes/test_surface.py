"""Loss surfaces: the centre is the model, the directions are shared, and a kill loses nothing."""

import dataclasses
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import nn
from worlds import federation, play, samples

from fedlesam.cli import cli
from fedlesam.core.batches import Batches
from fedlesam.core.evaluation import combine, score_batches
from fedlesam.core.flat_model import FlatModel
from fedlesam.models.small import cnn
from fedlesam.probes import GlobalLoss, Grid, Surface, directions, readings, surface_of
from fedlesam.report import surfaces as pictures
from fedlesam.report.pictures import PAPER
from fedlesam.runs import config as configs
from fedlesam.runs.config import RunConfig
from fedlesam.runs.runner import execute

SMALL = Grid(dims=2, points=5, span=0.5, samples=0)


@pytest.fixture(scope="module")
def loss() -> GlobalLoss:
    return GlobalLoss.of(play(federation("fedlesam", clients=samples((8, 8, 8)), active=2), [(0, 1), (1, 2)]))


def test_the_centre_is_what_the_evaluation_says(loss: GlobalLoss) -> None:
    w = loss.model.weights.clone()
    x, y = (torch.cat(parts) for parts in zip(*loss.data, strict=True))  # type: ignore[arg-type]
    model = FlatModel(nn.Sequential(*loss.model.module.children()))
    tested = combine(score_batches(model, Batches((x, y), model.device), nn.functional.cross_entropy))
    for dims in (1, 2):
        found = surface_of(loss, w, dataclasses.replace(SMALL, dims=dims))
        assert found.loss.shape == (5,) * dims
        assert found.loss[(2,) * dims] == pytest.approx(tested.loss, rel=1e-12)
        assert found.accuracy[(2,) * dims] == pytest.approx(tested.accuracy)
        assert found.x.tolist() == [-0.5, -0.25, 0, 0.25, 0.5]


def test_the_grid_is_where_it_says(loss: GlobalLoss) -> None:
    """Rows are y, columns x: w + x * first + y * second."""
    w = loss.model.weights.clone()
    first, second = directions(w, loss.model.shapes, 2)
    found = surface_of(loss, w, SMALL)
    assert found.loss[4, 1] == loss.value(w - 0.25 * first + 0.5 * second)
    assert found.loss[1, 4] == loss.value(w + 0.5 * first - 0.25 * second)
    line = surface_of(loss, w, dataclasses.replace(SMALL, dims=1))
    assert line.loss.tolist() == found.loss[2].tolist(), "the first direction is the same"


def test_directions_are_filter_normalised_and_shared() -> None:
    one = FlatModel(cnn((3, 8, 8), 10, width=4))
    w, other = one.weights.clone(), one.weights * 3 + 0.01
    found, again = directions(w, one.shapes, 2, seed=5), directions(other, one.shapes, 2, seed=5)
    for d, e in zip(found, again, strict=True):
        for weight, here, there in zip(one.views(w), one.views(d), one.views(e), strict=True):
            if weight.ndim < 2:
                assert not here.any()
                continue
            torch.testing.assert_close(here.flatten(1).norm(dim=1), weight.flatten(1).norm(dim=1))
            for a, b in zip(here.flatten(1), there.flatten(1), strict=True):
                torch.testing.assert_close(a / a.norm(), b / b.norm()), "the same random numbers for every method"
    assert abs(float(found[0] @ found[1])) < 0.5 * float(found[0].norm() * found[1].norm())
    assert not torch.equal(found[0], directions(w, one.shapes, 1, seed=6)[0])


class Stop(BaseException):
    """As Ctrl-C is: no Exception."""


def test_it_goes_on_where_it_was_interrupted(loss: GlobalLoss, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w, path = loss.model.weights.clone(), tmp_path / "surface-2d.safetensors"
    whole = surface_of(loss, w, SMALL)

    def stop(done: int, of: int) -> None:
        assert of == 25
        if done == 7:
            raise Stop

    with pytest.raises(Stop):
        surface_of(loss, w, SMALL, path, tick=stop)
    assert not path.exists(), "no reader sees half a surface"
    asked = []
    score = loss.score
    monkeypatch.setattr(loss, "score", lambda there: asked.append(1) or score(there))
    found = surface_of(loss, w, SMALL, path)
    assert len(asked) == 18
    assert found.loss.tolist() == whole.loss.tolist()
    assert found.accuracy.tolist() == whole.accuracy.tolist()
    assert surface_of(loss, w, SMALL, path).loss.tolist() == whole.loss.tolist()
    assert len(asked) == 18, "a finished one is read"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    surface_of(loss, w + 1e-3, SMALL, path)
    assert len(asked) == 18 + 25, "other weights are another surface"
    surface_of(loss, w + 1e-3, dataclasses.replace(SMALL, seed=1), path)
    assert len(asked) == 18 + 50, "so are other directions"


def test_the_file(loss: GlobalLoss, tmp_path: Path) -> None:
    path = tmp_path / "surface-2d.safetensors"
    found = surface_of(loss, loss.model.weights.clone(), SMALL, path, {"rounds": 2, "seed": 7})
    with safe_open(path, framework="np") as file:
        assert set(file.keys()) == {"x", "y", "loss", "accuracy"}
        assert file.get_tensor("loss").tolist() == found.loss.tolist()
    metadata = readings.read_surface(path).metadata
    assert metadata.items() >= {"rounds": 2, "seed": 7, "span": 0.5, "samples": 24, "directions_seed": 0}.items()
    with safe_open(path, framework="np") as file:
        parts, header = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    save_file(parts, path, {"about": header["metadata"]})
    assert readings.read_surface(path).metadata == metadata, "an older file"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="is not a loss surface"):
        surface_of(loss, loss.model.weights.clone(), SMALL, path)


def test_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real process, killed where it cannot react; the same command finishes its work, with the same numbers."""
    small = {"clients": 4, "active": 2, "rounds": 1, "model": "mlp:hidden=4", "threads": 1}
    for name in ("a", "b"):
        execute(configs.resolve(RunConfig(**small)), tmp_path / name)  # type: ignore[arg-type]
    save_always = (
        "import sys; from fedlesam.cli import main; from fedlesam.probes import surface;"
        "import time; write = surface.write_surface; surface.SECONDS_BETWEEN_SAVES = 0;"
        "surface.write_surface = lambda *a: (write(*a), time.sleep(0.1)); sys.argv[0] = 'fedlesam'; main()"
    )
    measure = ["probe", "a", "--probe", "surface:points=11,samples=50", "--quiet"]
    part = tmp_path / "a" / ".surface-2d.part.safetensors"
    running = subprocess.Popen([sys.executable, "-c", save_always, *measure], cwd=tmp_path)
    try:
        for _ in range(2000):
            if part.exists():
                break
            assert running.poll() is None
            time.sleep(0.02)
        running.send_signal(signal.SIGKILL)
    finally:
        running.kill()
        running.wait()
    monkeypatch.chdir(tmp_path)
    done = np.isfinite(readings.read_surface(part).loss).sum()
    assert 0 < done < 11 * 11
    for name in ("a", "b"):
        cli.main(["probe", name, *measure[2:]], standalone_mode=False)
    assert not part.exists()
    found, whole = (readings.read_surface(tmp_path / name / "surface-2d.safetensors") for name in ("a", "b"))
    assert found.loss.tolist() == whole.loss.tolist()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"points": 0}, "points must be a whole number from 3, got 0"),
        ({"points": 4}, "points must be odd, so that the model itself is one, got 4"),
        ({"dims": 3}, "dims must be at most 2, got 3"),
        ({"span": 0.0}, "span must be above 0, got 0"),
        ({"samples": -1}, "samples must be a whole number from 0, got -1"),
    ],
)
def test_bad_grids(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Grid(**settings)


# pictures


def bowl(height: float, dims: int = 2, walls: float = 0.0) -> Surface:
    x = np.linspace(-1, 1, 11)
    loss = height * (x**2 if dims == 1 else x[None] ** 2 + x[:, None] ** 2) + 0.1
    loss[(0,) * dims] += walls
    return Surface(x, loss, 1 - loss / 10, {})


def test_one_scale_for_all(tmp_path: Path) -> None:
    surfaces = {"fedavg": bowl(1.0), "fedlesam": bowl(0.2), "fedsam": bowl(3.0, walls=np.inf)}
    low, high = pictures.scale_of(list(surfaces.values()))
    assert low == pytest.approx(0.1)
    assert high < 4
    contours, heights = pictures.contours(surfaces), pictures.heights(surfaces)
    for figure in (contours, heights):
        FigureCanvasAgg(figure).draw()
    panels = [a for a in contours.axes if a.get_title()]
    assert len(panels) == 3
    assert all(a.collections[0].get_clim() == pytest.approx((low, high)) for a in panels)
    deep: list[Any] = [a for a in heights.axes if a.get_title()]
    assert len(deep) == 3
    for axes in deep:
        assert axes.get_zlim() == pytest.approx((low, high))
        assert axes.collections[0].get_clim() == pytest.approx((low, high))


def test_pictures_are_files(tmp_path: Path) -> None:
    one, other = ("#0072B2", "-"), ("#D55E00", "--")
    both = [("fedavg", one, bowl(1.0)), ("my method", other, bowl(2.0))]
    both += [("fedavg", one, bowl(1.0, 1)), ("my method", other, bowl(2.0, 1))]
    drawn = pictures.draw(both, tmp_path / "deep" / "figures")
    assert {p.name for p in drawn} == {
        f"surface-{name}.{kind}" for name in ("1d", "2d-contours", "2d-heights") for kind in ("png", "pdf")
    }
    for path in drawn:
        if path.suffix == ".png":
            with Image.open(path) as image:
                assert len(set(image.convert("L").get_flattened_data())) > 50, "it is not blank"
        else:
            assert path.read_bytes().startswith(b"%PDF")


def test_a_flat_surface_can_be_drawn(tmp_path: Path) -> None:
    flat = dataclasses.replace(bowl(0.0), loss=np.full((11, 11), 0.3))
    assert len(pictures.draw([("fedavg", ("#0072B2", "-"), flat)], tmp_path)) == 4
    nothing = dataclasses.replace(bowl(0.0), loss=np.full((11, 11), np.inf))
    assert len(pictures.draw([("fedavg", ("#0072B2", "-"), nothing)], tmp_path)) == 4


def test_the_titles_of_nine_methods_have_room() -> None:
    names = ["centralised SGD", "fedlesam rho=0.5 weighting=examples", *(f"fedlesam-s lr={i}.25" for i in range(7))]
    surfaces = dict.fromkeys(names, bowl(1.0))
    with rc_context(PAPER):
        for figure in (pictures.contours(surfaces), pictures.heights(surfaces)):
            canvas = FigureCanvasAgg(figure)
            canvas.draw()
            boxes = [a.title.get_window_extent(canvas.get_renderer()) for a in figure.axes if a.get_title()]
            assert len(boxes) == 9
            for i, box in enumerate(boxes):
                assert not any(box.overlaps(other) for other in boxes[i + 1 :])
                assert box.x0 >= 0
                assert box.y1 <= figure.bbox.y1
