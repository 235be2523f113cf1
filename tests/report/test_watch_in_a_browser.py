"""The live page in a real browser: it renews itself, and keeps what its reader had chosen."""

import threading
from pathlib import Path

from browser import MARKS, Browser
from browser import browser as browser
from fake_runs import fake_run

from fedlesam.report.watch import LivePage, Server

pytestmark = MARKS


def test_the_page_renews_itself(browser: Browser, tmp_path: Path) -> None:
    for name in ("fedavg", "fedsam"):
        fake_run(tmp_path / name, name, rounds=4, finished=False)
    with Server(LivePage([tmp_path / "fedavg", tmp_path / "fedsam"])) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            browser.open(server.address)
            browser.until("return document.getElementById('live').textContent.startsWith('live, as of')")
            browser.chip("fedavg").click()
            old = browser.run("return document.getElementById('live').dataset.state")
            longer = fake_run(tmp_path / "elsewhere" / "fedsam", "fedsam", rounds=6, finished=False)
            (longer / "metrics.jsonl").replace(tmp_path / "fedsam" / "metrics.jsonl")
            browser.until("return document.getElementById('live')?.dataset.state !== arguments[0]", old)
            browser.until("return document.documentElement.dataset.ready === 'yes'")
            pressed = browser.chip("fedavg").get_attribute("aria-pressed")
            assert pressed == "false", "what was hidden stays hidden"
            assert not browser.errors()
            asked = set(browser.requests())
            assert asked <= {server.address, f"{server.address}state", "data:,"}
        finally:
            server.shutdown()
            thread.join()
    browser.until("return document.getElementById('live').textContent.startsWith('not live')")
