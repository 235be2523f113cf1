"""Pictures are real files that show what they should."""

from pathlib import Path

import numpy as np
import pytest
from fake_runs import fake_run
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from fedlesam.algorithms import CATALOGUE, PAPER
from fedlesam.report.pictures import accuracy_curves, split_heat_map
from fedlesam.report.style import COLOURS, FAMILY, MARKERS, ON_DARK, looks, style
from fedlesam.runs.config import RunConfig
from fedlesam.runs.read import Run, find_runs

DARK, LIGHT = (8, 48, 107), (247, 251, 255)
"""The ends of the map Blues."""


def pixels(path: Path, size: tuple[int, int]) -> NDArray[np.uint8]:
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.size == size
        return np.asarray(image.convert("RGB"))


def places(picture: NDArray[np.uint8], colour: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and columns of a colour, left of the colour bar."""
    rows, columns = np.nonzero((picture == colour).all(2))
    left = columns < 0.85 * picture.shape[1]
    return rows[left], columns[left]


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def run(algorithm: str, values: list[float], seed: int = 0) -> Run:
    records = [{"round": t, "test_accuracy": value} for t, value in enumerate(values)]
    return Run(Path("x"), RunConfig(algorithm=algorithm, seed=seed), {}, records)


def test_heat_map_shows_clients_to_the_right_and_classes_upwards(tmp_path: Path) -> None:
    counts = np.array([[7, 0, 0], [0, 0, 7]])  # client 0 has class 0, client 1 class 2
    path = split_heat_map(counts, ["a", "b", "c"], tmp_path / "new" / "split.png", "a title")
    picture = pixels(path, (1080, 540))
    assert [p.name for p in path.parent.iterdir()] == ["split.png"]
    all_rows, all_columns = (
        np.concatenate(both) for both in zip(places(picture, DARK), places(picture, LIGHT), strict=True)
    )
    top, bottom, left, right = all_rows.min(), all_rows.max(), all_columns.min(), all_columns.max()
    assert right - left > 400
    assert bottom - top > 200

    def cell(client: int, c: int) -> tuple[int, ...]:
        row = bottom - int((c + 0.5) * (bottom - top) / 3)
        column = left + int((client + 0.5) * (right - left) / 2)
        return tuple(int(v) for v in picture[row, column])

    for client in range(2):
        for c in range(3):
            assert cell(client, c) == (DARK if counts[client, c] else LIGHT), (client, c)


def test_heat_map_of_many_classes_and_clients(tmp_path: Path) -> None:
    counts = np.random.default_rng(0).integers(0, 50, (300, 100))
    picture = pixels(split_heat_map(counts, [str(c) for c in range(100)], tmp_path / "x.png", "t"), (1080, 540))
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 100


def test_curves_lie_where_their_numbers_are(tmp_path: Path) -> None:
    path = accuracy_curves([run("fedavg", [0.2, 0.3, 0.4]), run("scaffold", [0.6, 0.7, 0.8])], tmp_path / "a.png", "t")
    picture = pixels(path, (1080, 660))[:500]  # above the legend
    low, high = (places(picture, rgb(style(name, [])[0]))[0] for name in ("fedavg", "scaffold"))
    assert len(low) > 20
    assert len(high) > 20
    assert high.mean() < low.mean(), "pictures count rows from the top"
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"]


def test_seeds_have_a_range(tmp_path: Path) -> None:
    one = pixels(accuracy_curves([run("fedavg", [0.5, 0.5])], tmp_path / "1.png", "t"), (1080, 660))
    two = pixels(
        accuracy_curves([run("fedavg", [0.4, 0.4]), run("fedavg", [0.6, 0.6], 1)], tmp_path / "2.png", "t"), (1080, 660)
    )
    white = [int((picture == 255).all(2).sum()) for picture in (one, two)]
    assert white[1] < 0.7 * white[0], "the band between the seeds"


def test_runs_without_accuracy_still_give_a_picture(tmp_path: Path) -> None:
    stopped = Run(Path("x"), RunConfig(), {}, [])
    pixels(accuracy_curves([stopped, run("fedavg", [0.5, 0.6])], tmp_path / "a.png", "t"), (1080, 660))
    pixels(accuracy_curves([stopped], tmp_path / "b.png", "t"), (1080, 660))


def test_a_run_that_ended_early_shortens_the_mean(tmp_path: Path) -> None:
    runs = [run("fedavg", [0.5, 0.6, 0.7]), run("fedavg", [0.5], seed=1)]
    pixels(accuracy_curves(runs, tmp_path / "a.png", "t"), (1080, 660))


def test_a_method_with_a_look_of_its_own_has_it_in_every_picture() -> None:
    own = {name: style(name, list(CATALOGUE)) for name in CATALOGUE if name in FAMILY}
    assert {make.__name__.replace("_", "-") for make in PAPER} <= own.keys()
    assert len(set(own.values())) == len(own)
    assert own == {name: style(name, [name]) for name in own}, "the same in every picture"


@pytest.mark.parametrize("methods", [list(CATALOGUE)[:30], list(CATALOGUE)[-20:]], ids=["first", "last"])
def test_no_two_methods_of_a_picture_look_alike(methods: list[str]) -> None:
    assert len(set(looks(methods))) == len(methods)


@pytest.mark.parametrize("beside", CATALOGUE)
def test_methods_of_your_own_get_colours_that_are_left(beside: str) -> None:
    taken = [beside, "mine:one", "mine:two"]
    looks = [style(name, taken) for name in taken]
    assert len({colour for colour, _ in looks}) == 3
    assert {colour for colour, _ in looks} <= set(COLOURS)


@pytest.mark.parametrize("count", [3, 12])
def test_points_have_names_or_with_many_methods_a_legend_with_their_markers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    kept: list[Figure] = []
    monkeypatch.setattr("fedlesam.report.pictures.save", lambda figure, path: kept.append(figure))
    for name in list(CATALOGUE)[:count]:
        fake_run(tmp_path / name, name, probes=True)
    accuracy_curves(find_runs([tmp_path]), tmp_path / "x.png", "a title")
    curves, points = kept[0].axes
    assert len(points.texts) == (3 if count == 3 else 0)
    if count == 12:
        shown = {(line.get_color(), line.get_marker()) for line in curves.lines}
        assert len(shown) == 12
        assert {marker for _, marker in shown} <= set(MARKERS.values())
        drawn = {(bars[0].get_color(), bars[0].get_marker()) for bars in points.containers}
        assert drawn == shown, "the legend's"


@pytest.mark.parametrize("colour", COLOURS)
def test_every_colour_is_seen_on_light_and_on_dark_paper(colour: str) -> None:
    def light(shade: str) -> float:
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in rgb(shade))]
        return 0.05 + 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    assert light("#FFFFFF") / light(colour) > 2
    assert light(ON_DARK.get(colour, colour)) / light("#171B21") > 2.5, "on a card of the dark page"


def test_more_methods_than_colours() -> None:
    names = [f"mine:m{i}" for i in range(20)]
    assert {style(name, names)[0] for name in names} == set(COLOURS)
