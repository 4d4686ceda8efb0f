"""A report in headless chromium: it is drawn, its controls work, no script fails and nothing is requested."""

import json
import os
import pathlib
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

from digen_jax.logging.report import write_report
from tests.logging.workdirs import write_workdir

REQUIRED = "DIGEN_JAX_CHROMIUM"  # "required": a missing browser fails; .ci/run sets it
# The browser itself requests updates and the time: no name is resolved, so that nothing leaves this machine.
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-extensions", "--disable-default-apps", "--enable-logging=stderr", "--virtual-time-budget=10000",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        message = "there is no chromium: apt-get install chromium"
        if os.environ.get(REQUIRED) == "required":
            pytest.fail(message)
        pytest.skip(message)
    return found


class Visit:
    """What a browser did with a page."""

    def __init__(self, chromium: str, page: pathlib.Path, *options: str):
        log = page.with_suffix(".net.json")
        profile = page.with_suffix(".profile")
        command = [
            chromium, *FLAGS, f"--user-data-dir={profile}", f"--log-net-log={log}", *options, page.as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        self.dom = done.stdout
        self.console = [line for line in done.stderr.splitlines() if ":CONSOLE:" in line]
        self.requests = _requests(log)

    @property
    def failures(self) -> list[str]:
        """Lines of the console except bokeh's two."""
        return [line for line in self.console if '"[bokeh ' not in line]


def _requests(log: pathlib.Path) -> set[str]:
    """Returns the addresses that the page requested; requests of the browser itself have no origin."""
    found = json.loads(log.read_text())
    start = found["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    jobs = [
        event["params"] for event in found["events"] if event["type"] == start and "params" in event
    ]
    assert jobs and all("initiator" in job for job in jobs if "url" in job)
    return {job["url"] for job in jobs if job.get("initiator", "not an origin") != "not an origin"}


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> pathlib.Path:
    base = tmp_path_factory.mktemp("browser")
    output = base / "report.html"
    write_report([write_workdir(base / f"seed{seed}", seed) for seed in range(2)], output)
    return output


def edited(report: pathlib.Path, name: str, old: str, new: str) -> pathlib.Path:
    """A copy of the page with another text in one place."""
    text = report.read_text()
    assert text.count(old) == 1
    copy = report.with_name(name)
    copy.write_text(text.replace(old, new))
    return copy


def painted(image: np.ndarray, color: str) -> int:
    """Returns the number of pixels of a color in a screenshot."""
    wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return int((np.abs(image.astype(int) - wanted) <= 3).all(-1).sum())


def test_the_page_is_drawn_without_errors_and_requests(chromium, report):
    shot = report.with_suffix(".png")
    visit = Visit(chromium, report, f"--screenshot={shot}", "--window-size=1280,6000")
    assert visit.failures == [] and visit.requests == set()
    image = np.asarray(Image.open(shot).convert("RGB"))
    assert image.shape == (6000, 1280, 3)
    # Curves are blue and orange, a step's training is a green bar.
    assert painted(image, "#1f77b4") > 500 and painted(image, "#d9730d") > 500
    assert painted(image, "#54a24b") > 5000
    assert painted(image, "#24292f") > 500  # letters


def test_sliders_select_steps_and_split_images(chromium, report):
    moved = """<script>for (const input of document.querySelectorAll("input[type=range]")) {
      input.value = 0; input.dispatchEvent(new Event("input")); }</script></body>"""
    visit = Visit(chromium, edited(report, "moved.html", "</body>\n", moved), "--dump-dom")
    assert visit.failures == []
    assert visit.dom.count('style="--cut: 0%;"') == 2
    assert visit.dom.count("<output>step 0</output>") == 2
    assert visit.dom.count("<output>step 1, 11.00 s</output>") == 2
    still = Visit(chromium, report, "--dump-dom").dom
    assert still.count('style="--cut: 50%;"') == 2 and still.count("<output>step 10</output>") == 2
    assert still.count("<output>step 10, 11.00 s</output>") == 2
