"""A real browser for tests: headless Chromium, driven by its own driver."""

import base64
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
PATIENCE = 600
"""Seconds: surfaces are drawn without a graphics card, and a machine may have other work."""

MARKS = [
    pytest.mark.extras,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None,
        reason="needs chromium and chromedriver: apt install chromium chromium-driver",
    ),
]


class Browser:
    """A page that is open, and what a test asks of it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path | str, width: int = 1280, height: int = 900, *, scheme: str = "light") -> None:
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": width < 600})
        self.errors(), self.requests()
        self.driver.get(page.as_uri() if isinstance(page, Path) else page)
        self.until("return document.documentElement.dataset.ready === 'yes'")

    def run(self, script: str, *args: Any) -> Any:
        return self.driver.execute_script(script, *args)

    def until(self, script: str, *args: Any) -> Any:
        """Wait for a script to give something true; the limit is only there so that a broken page ends the test."""
        end = time.monotonic() + PATIENCE
        while not (found := self.run(script, *args)):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.05)
        return found

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def requests(self) -> list[str]:
        """All addresses asked for since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]

    def show(self, heading: str) -> Any:
        """Scroll to the card of that heading and give it once it is drawn."""
        card = self.run(
            "const card = [...document.querySelectorAll('[data-panel]')]"
            ".find((c) => c.querySelector('h3').textContent === arguments[0]);"
            "card.scrollIntoView({block: 'center'}); return card",
            heading,
        )
        self.run(  # a chart that comes into view is drawn anew after a frame
            "return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))"
        )
        self.until("return [...arguments[0].querySelectorAll('.plot')].some((p) => p.data)", card)
        return card

    def lines(self, card: Any) -> dict[str, list[float]]:
        """Names and values of the lines drawn, without the bands."""
        script = (
            "return arguments[0].querySelector('.plot').data.filter((t) => t.meta && t.meta.group !== undefined)"
            ".map((t) => [t.name, Array.from(t.y)])"
        )
        return dict(self.run(script, card))

    def chip(self, name: str) -> Any:
        script = (
            "return [...document.querySelectorAll('.chip')]"
            ".find((c) => (c.dataset.label || c.textContent.trim()) === arguments[0])"
        )
        return self.run(script, name)

    def choose(self, selector: str, text: str, card: Any) -> None:
        """Of a list of choices inside a card."""
        script = (
            "const list = arguments[2].querySelector(arguments[0]);"
            "list.value = [...list.options].find((o) => o.textContent === arguments[1]).value;"
            "list.dispatchEvent(new Event('change'))"
        )
        self.run(script, selector, text, card)

    def surfaces(self) -> list[Any]:
        return list(self.run("return [...document.querySelectorAll('.scenes .plot')]"))

    def picture(self, path: Path) -> None:
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {})
        path.write_bytes(base64.b64decode(shot["data"]))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    pytest.importorskip("selenium", reason="needs selenium: pip install 'fedlesam[extras]'")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    flags = "--headless=new --disable-dev-shm-usage --use-angle=swiftshader --enable-unsafe-swiftshader"
    for flag in (*flags.split(), "--no-sandbox" if os.geteuid() == 0 else "--no-first-run"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    driver.set_script_timeout(PATIENCE)
    driver.set_page_load_timeout(PATIENCE)
    yield Browser(driver)
    driver.quit()
