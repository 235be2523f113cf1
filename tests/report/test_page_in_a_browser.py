"""The page of a report in a real browser: headless Chromium, driven by its own driver."""

import csv
import io
import time
from pathlib import Path

import pytest
from browser import MARKS, Browser
from browser import browser as browser
from fake_runs import fake_run, fake_sweep

from fedlesam.report.write import write_report
from fedlesam.runs.read import find_runs

METHODS = ["fedavg", "fedlesam", "fedlesam-s", "fedsam", "scaffold"]
pytestmark = MARKS


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five methods, three seeds each, with all probes and surfaces."""
    folder = tmp_path_factory.mktemp("five")
    for name in METHODS:
        for seed in range(3):
            hyper = {"rho": 0.1} if "sam" in name else {}
            fake_run(folder / "runs" / f"{name}-{seed}", name, seed=seed, rounds=30, probes=True, hyper=hyper)
    write_report(find_runs([folder / "runs"]), folder / "report.html")
    return folder / "report.html"


def test_opens_without_an_error_and_asks_for_nothing(browser: Browser, page: Path) -> None:
    browser.open(page)
    for heading in browser.run("return [...document.querySelectorAll('[data-panel] h3')].map((h) => h.textContent)"):
        browser.show(heading)
    assert browser.errors() == []
    assert [url for url in browser.requests() if not url.startswith(("data:", "blob:"))] == [page.as_uri()]
    assert browser.run("return document.title") == "5 methods on digits"


def test_the_browser_itself_refuses_the_network(browser: Browser, page: Path, tmp_path: Path) -> None:
    """Should some part of the page try: its policy forbids it, and forbids scripts that are not the page's own."""
    inside = "<img src='https://example.org/x.png'><script>window.foreign = true</script></main>"
    (tmp_path / "x.html").write_text(page.read_text(encoding="utf-8").replace("</main>", inside, 1), encoding="utf-8")
    browser.open(tmp_path / "x.html")
    assert len([text for text in browser.errors() if "Content Security Policy" in text]) >= 2
    assert browser.run("return window.foreign === undefined")


def test_no_button_sends_data_away(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.show("Test accuracy")
    titles = browser.run("return [...document.querySelectorAll('.modebar-btn')].map((b) => b.dataset.title)")
    assert any("Zoom" in title for title in titles), "the bar is there"
    assert not any(word in title.lower() for title in titles for word in ("cloud", "share", "studio", "plotly"))


def test_charts_have_the_numbers_of_the_runs(browser: Browser, page: Path) -> None:
    browser.open(page)
    drawn = browser.lines(browser.show("Test accuracy"))
    assert sorted(drawn) == METHODS
    runs = find_runs([page.parent / "runs"])
    for name, values in drawn.items():
        curves = [run.curve("test_accuracy")[1] for run in runs if run.algorithm == name]
        means = [100 * sum(at) / 3 for at in zip(*curves, strict=True)]
        assert values == pytest.approx(means, rel=1e-4)
    assert sorted(browser.lines(browser.show("Test loss"))) == METHODS
    assert sorted(browser.lines(browser.show("Drift"))) == ["fedlesam", "fedlesam-s", "fedsam"], "those that perturb"
    assert sorted(browser.lines(browser.show("Sharpness"))) == METHODS
    assert sorted(browser.lines(browser.show("Loss along a line"))) == METHODS
    card = browser.show("Split")
    counts = runs[0].class_counts()
    assert counts is not None
    assert browser.run("return arguments[0].querySelector('.plot').data[0].z", card) == counts.T.tolist()


def test_one_toggle_acts_on_all_charts_and_tables(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.show("Test accuracy")
    chip = browser.chip("fedavg")
    chip.click()
    assert chip.get_attribute("aria-pressed") == "false"
    others = [name for name in METHODS if name != "fedavg"]
    for heading in ("Test accuracy", "Test loss", "Training loss", "Sharpness", "Loss along a line"):
        assert sorted(browser.lines(browser.show(heading))) == others, heading
    browser.show("Around the final model")
    assert len(browser.surfaces()) == 4
    dimmed = browser.run("return [...document.querySelectorAll('tr.off th[scope=row]')].map((c) => c.textContent)")
    assert set(dimmed) == {"fedavg"}
    assert len(dimmed) >= 3, "in every table"
    chip.click()
    assert sorted(browser.lines(browser.show("Test accuracy"))) == METHODS
    browser.chip("none").click()
    assert browser.lines(browser.show("Test accuracy")) == {}
    browser.chip("all").click()
    assert sorted(browser.lines(browser.show("Test accuracy"))) == METHODS
    assert browser.errors() == []


def test_seeds_have_bands(browser: Browser, page: Path) -> None:
    browser.open(page)
    card = browser.show("Test accuracy")
    script = (
        "return arguments[0].querySelector('.plot').data.filter((t) => t.fill === 'toself').map((t) => t.meta.band)"
    )
    assert sorted(browser.run(script, card)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_twelve_methods_differ_in_colour_and_points_also_in_marker(
    browser: Browser, tmp_path: Path, scheme: str
) -> None:
    more = ["fedgamma", "feddyn", "fedsmoo", "fedcm", "mofedsam", "freesam", "fedprox"]
    for name in [*METHODS, *more]:
        fake_run(tmp_path / "runs" / name, name, probes=True, hyper={"rho": 0.1} if "sam" in name else {})
    write_report(find_runs([tmp_path / "runs"]), tmp_path / "report.html")
    browser.open(tmp_path / "report.html", scheme=scheme)
    script = (
        "return arguments[0].querySelector('.plot').data.filter((t) => t.meta && t.meta.group !== undefined)"
        ".map((t) => [t.name, t.line.color, t.marker.symbol])"
    )
    drawn = {name: (colour, symbol) for name, colour, symbol in browser.run(script, browser.show("Sharpness"))}
    assert len(drawn) == len({colour for colour, _ in drawn.values()}) == 12
    assert drawn["fedlesam"][1] == "square" != drawn["fedavg"][1], "its line is dashed"


def test_curves_against_what_they_cost(browser: Browser, page: Path) -> None:
    browser.open(page)
    bar = browser.run("return document.getElementById('bar')")
    browser.choose("#against", "MB sent", bar)
    for heading, last in (("Test accuracy", 60), ("Training loss", 60), ("Sharpness", 60)):
        card = browser.show(heading)
        ends = dict(
            browser.run(
                "return arguments[0].querySelector('.plot').data.filter((t) => t.meta.group !== undefined)"
                ".map((t) => [t.name, t.x[t.x.length - 1]])",
                card,
            )
        )
        assert ends == {"fedavg": last, "fedlesam": last, "fedsam": last, "scaffold": 2 * last, "fedlesam-s": 2 * last}
        assert browser.run("return arguments[0].querySelector('.plot').layout.xaxis.title.text", card) == "MB sent"
    along = browser.show("Loss along a line")
    assert browser.run("return arguments[0].querySelector('.plot').layout.xaxis.title.text", along) == "distance"


def test_curves_are_smoothed_and_cut(browser: Browser, page: Path) -> None:
    browser.open(page)
    bar = browser.run("return document.getElementById('bar')")
    before = browser.lines(browser.show("Test accuracy"))["fedavg"]
    low = browser.run(
        "return arguments[0].querySelector('.plot')._fullLayout.yaxis.range[0]", browser.show("Test accuracy")
    )
    assert low <= min(before), "the first rounds are visible"
    browser.choose("#smooth", "5", bar)
    after = browser.lines(browser.show("Test accuracy"))["fedavg"]
    assert after[10] == pytest.approx(sum(before[8:13]) / 5)
    assert after[0] == before[0], "the window shrinks at the ends"
    assert after[1] == pytest.approx(sum(before[0:3]) / 3)
    card = browser.show("Test accuracy")
    assert "running mean of 5" in browser.run("return arguments[0].querySelector('.caption').textContent", card)
    browser.choose("#smooth", "off", bar)
    browser.choose("#span", "second half", bar)
    assert browser.lines(browser.show("Test accuracy"))["fedavg"] == before[14:]
    assert browser.errors() == []


def test_the_legend_has_hyper_parameters(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.chip("fedsam").text.split() == ["fedsam", "rho=0.1"]
    assert browser.chip("fedavg").text == "fedavg"


def test_curves_are_saved_as_a_file(browser: Browser, page: Path, tmp_path: Path) -> None:
    browser.open(page)
    allow = {"behavior": "allow", "downloadPath": str(tmp_path)}
    browser.driver.execute_cdp_cmd("Browser.setDownloadBehavior", allow)
    browser.run("document.getElementById('curves-csv').click()")
    end = time.monotonic() + 60
    while not (tmp_path / "curves.csv").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    saved = list(csv.reader(io.StringIO((tmp_path / "curves.csv").read_text())))
    write_report(find_runs([page.parent / "runs"]), tmp_path / "r.html", tables=tmp_path)
    exact = list(csv.reader(io.StringIO((tmp_path / "curves.csv").read_text())))
    assert saved[0] == exact[0]
    for mine, theirs in zip(sorted(saved[1:]), sorted(exact[1:]), strict=True):
        assert mine[:2] == theirs[:2]
        assert [float(x) for x in mine[2:]] == pytest.approx([float(x) for x in theirs[2:]], rel=1e-4)


def test_a_sweep_over_one_two_and_three_settings(browser: Browser, tmp_path: Path) -> None:
    write_report(find_runs([fake_sweep(tmp_path / "runs")]), tmp_path / "report.html")
    browser.open(tmp_path / "report.html")
    card = browser.show("Over settings")
    drawn = browser.lines(card)
    assert (len(drawn["fedsam"]), len(set(drawn["fedavg"]))) == (3, 1), "what was not swept is a level line"
    assert browser.run("return arguments[0].querySelector('.plot')._fullLayout.xaxis.type", card) == "log"
    browser.choose("[data-choose]", "fedlesam: lr and rho", card)
    [z] = browser.run("return arguments[0].querySelector('.plot').data.map((t) => t.z)", card)
    assert (len(z), len(z[0])) == (3, 2)
    browser.choose("[data-choose]", "fedsmoo: 3 settings", card)
    assert browser.run("return arguments[0].querySelector('.plot').data.length", card) == 12
    browser.chip("none").click()
    assert browser.run("return arguments[0].querySelector('.plot').data.length", card) == 0
    assert browser.errors() == []


def test_a_probe_has_a_choice_of_its_numbers(browser: Browser, page: Path) -> None:
    browser.open(page)
    card = browser.show("Sharpness")
    before = browser.lines(card)["fedavg"]
    browser.choose("[data-choose]", "first order", card)
    assert browser.lines(card)["fedavg"] == pytest.approx([value / 1.3 for value in before], rel=1e-3)


def test_surfaces_share_their_scales_and_turn_together(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.show("Around the final model")
    plots = browser.surfaces()
    assert len(plots) == 5
    ranges = [browser.run("return arguments[0].layout.scene.zaxis.range", plot) for plot in plots]
    colours = [browser.run("const t = arguments[0].data[0]; return [t.cmin, t.cmax]", plot) for plot in plots]
    assert all(found == ranges[0] for found in ranges + colours)
    lows = [browser.run("return Math.min(...arguments[0].data[0].z.flat())", plot) for plot in plots]
    assert min(lows) == ranges[0][0]
    eye = {"x": 0.5, "y": -1.5, "z": 1.0}
    browser.run("Plotly.relayout(arguments[0], {'scene.camera': {eye: arguments[1]}})", plots[2], eye)
    same = (
        "return arguments[0].every((p) => JSON.stringify(p.layout.scene.camera.eye) === JSON.stringify(arguments[1]))"
    )
    browser.until(same, plots, eye)


def test_surfaces_as_contours_and_on_a_log_scale(browser: Browser, page: Path) -> None:
    browser.open(page)
    card = browser.show("Around the final model")
    browser.choose("[data-view]", "contours", card)
    kinds = [browser.run("return arguments[0].data[0].type", plot) for plot in browser.surfaces()]
    assert kinds == ["contour"] * 5
    low = browser.run("return arguments[0].data[0].zmin", browser.surfaces()[0])
    browser.run("arguments[0].querySelector('[data-log]').click()", card)
    assert 10 ** browser.run("return arguments[0].data[0].zmin", browser.surfaces()[0]) == pytest.approx(low)
    assert browser.errors() == []


def test_all_is_reached_with_the_keyboard(browser: Browser, page: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    browser.open(page)
    seen, last = [], None
    for _ in range(80):
        ActionChains(browser.driver).send_keys(Keys.TAB).perform()
        here = browser.run(
            "const e = document.activeElement;"
            "return e.id || (e.dataset.group ? 'chip ' + e.dataset.group : e.className || e.tagName)"
        )
        if here == "BODY" and last == "BODY":
            break
        seen.append(here)
        last = here
    assert {"theme", "all", "none", "against", "skip"} <= set(seen)
    assert {f"chip {i}" for i in range(5)} <= set(seen)
    assert sum("plot" in name for name in seen) >= 8
    chip = browser.chip("fedavg")
    browser.run("arguments[0].focus()", chip)
    ActionChains(browser.driver).send_keys(Keys.SPACE).perform()
    assert chip.get_attribute("aria-pressed") == "false"


def test_zoom_and_turn_with_keys(browser: Browser, page: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    browser.open(page)
    card = browser.show("Test loss")
    width = (
        "const p = arguments[0].querySelector('.plot'); p.focus();"
        "const [a, b] = p._fullLayout.xaxis.range; return Math.abs(b - a)"
    )
    before = browser.run(width, card)
    ActionChains(browser.driver).send_keys("+").perform()
    assert browser.run(width, card) == pytest.approx(0.8 * before, rel=1e-3)
    browser.show("Around the final model")
    first, second = browser.surfaces()[:2]
    eye = "return arguments[0].layout.scene.camera.eye"
    at = browser.run(eye, first)
    browser.run("arguments[0].focus()", first)
    ActionChains(browser.driver).send_keys(Keys.ARROW_RIGHT).perform()
    browser.until("return arguments[0].layout.scene.camera.eye.x !== arguments[1]", second, at["x"])
    assert browser.run(eye, first) == browser.run(eye, second)


@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_light_and_dark_at_every_width(browser: Browser, page: Path, width: int, height: int, tmp_path: Path) -> None:
    """The page follows the system and the button; nothing sticks out sideways."""
    from PIL import Image

    for scheme, bright in (("light", True), ("dark", False)):
        browser.run("localStorage.clear()")
        browser.open(page, width, height, scheme=scheme)
        browser.show("Test accuracy")
        assert browser.run("return document.documentElement.scrollWidth") <= width
        browser.picture(tmp_path / f"{scheme}.png")
        with Image.open(tmp_path / f"{scheme}.png") as image:
            corner = image.convert("L").getpixel((2, height - 2))
            assert isinstance(corner, int | float)
            assert (corner > 128) == bright
    browser.run("document.getElementById('theme').click()")
    assert browser.run("return document.documentElement.dataset.theme") == "light"
    ink = "return document.querySelector('[data-panel=\"0\"] .plot').layout.font.color"
    assert browser.run(ink) == "#1a1d21", "charts follow the button"
    browser.run("localStorage.clear()")


def test_names_are_text_everywhere(browser: Browser, tmp_path: Path) -> None:
    """A method of one's own may be called anything."""
    evil = "</script><img src=x onerror=window.broken=1><b>x"
    fake_run(tmp_path / "runs" / "a", evil, probes=True)
    fake_run(tmp_path / "runs" / "b", "fedavg", probes=True, hyper={"note": "</textarea><i>'\""})
    write_report(find_runs([tmp_path / "runs"]), tmp_path / "report.html")
    browser.open(tmp_path / "report.html")
    card = browser.show("Test accuracy")
    assert browser.run("return window.broken === undefined")
    assert browser.run("return document.querySelectorAll('img, b, i:not(.scale i), textarea').length") == 0
    assert browser.chip(evil) is not None
    plot = browser.run("return arguments[0].querySelector('.plot')", card)
    browser.run("Plotly.Fx.hover(arguments[0], {xval: 5}, 'xy')", plot)
    browser.until("return arguments[0].querySelector('.hoverlayer').textContent.length > 0", plot)
    assert evil in browser.run("return arguments[0].querySelector('.hoverlayer').textContent", plot)
    assert browser.errors() == []


def test_twenty_runs_of_eight_hundred_rounds(browser: Browser, tmp_path: Path) -> None:
    names = [*METHODS, "fedadam", "fedcm", "feddyn", "mofedsam", "fedgamma", "fedsmoo", "fedlesam-d", "fedprox"]
    names += ["fedlesam-m", "freesam", "freesam-s", "freesam-d", "mine:a", "mine:b", "mine:c"]
    for name in names:
        fake_run(tmp_path / "runs" / name.replace(":", "-"), name, rounds=800, probes=True)
    assert len(names) == 20
    write_report(find_runs([tmp_path / "runs"]), tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 8_000_000
    browser.open(tmp_path / "report.html")
    assert len(browser.lines(browser.show("Test accuracy"))) == 20
    browser.chip("mine:b").click()
    drawn = browser.lines(browser.show("Test accuracy"))
    assert len(drawn) == 19
    assert all(len(values) == 800 for values in drawn.values())
    browser.show("Around the final model")
    kinds = {browser.run("return arguments[0].data[0].type", plot) for plot in browser.surfaces()}
    assert kinds == {"contour"}, "more than a browser can turn at once"
    assert browser.errors() == []


def test_a_single_unfinished_run(browser: Browser, tmp_path: Path) -> None:
    fake_run(tmp_path / "x", rounds=3, finished=False)
    write_report(find_runs([tmp_path / "x"]), tmp_path / "report.html")
    browser.open(tmp_path / "report.html")
    assert list(browser.lines(browser.show("Test accuracy"))) == ["fedavg"]
    assert "not finished" in browser.run("return document.querySelector('.note').textContent")
    assert browser.errors() == []
