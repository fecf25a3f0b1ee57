"""JupyterLab in a real browser: open notebooks, run all cells, move a slider, press stop.

Needs the system's chromium; where it is missing the tests skip, except in CI. Set A5_SCREENSHOTS to a folder to keep
pictures of what was seen.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests import notebook_tools as tools

ROOT = Path(__file__).parent.parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TOKEN = "for-this-test-only"

pytestmark = [
    pytest.mark.reference,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(CHROMIUM is None and not os.environ.get("CI"), reason="chromium is not installed here"),
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A JupyterLab server over a copy of the notebooks; gives its address."""
    place = tmp_path_factory.mktemp("lab")
    for folder in ("notebooks", "runs"):
        shutil.copytree(ROOT / folder, place / folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | tools.QUIET | {
        "A5_IMPL": "solutions", "A5_STEPS": "40", "JUPYTER_CONFIG_DIR": str(place / "config"),
        "JUPYTER_DATA_DIR": str(place / "data"), "JUPYTER_RUNTIME_DIR": str(place / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(place / "settings"), "JUPYTERLAB_WORKSPACES_DIR": str(place / "spaces"),
    }  # fmt: skip
    del env["CI"]  # a student sees widgets and bars
    with open(place / "server.log", "w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", "--ip=127.0.0.1",
             f"--port={port}", f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={place}",
             "--ServerApp.port_retries=0", "--LabApp.news_url=None",
             "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"],
            cwd=place, env=env, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"{url}/api?token={TOKEN}", timeout=5)
            break
        except (urllib.error.URLError, ConnectionError):
            assert server.poll() is None and time.monotonic() < deadline, (place / "server.log").read_text()
            time.sleep(0.3)
    yield url
    server.terminate()
    server.wait(20)


@pytest.fixture
def page():
    from playwright.sync_api import sync_playwright

    assert CHROMIUM, "CI needs chromium for this test"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1300, "height": 1000})
        page.set_default_timeout(60_000)
        yield page
        browser.close()


def open_and_run(page, lab, name):
    """Open a notebook in the simple interface, wait for its kernel, and run all its cells."""
    # the page says "idle" before it asks for a kernel, and forgets cells that are run before it is connected to one
    with page.expect_websocket(lambda socket: "/channels" in socket.url, timeout=120_000):
        page.goto(f"{lab}/doc/tree/notebooks/{name}.ipynb?token={TOKEN}&reset")
    page.wait_for_selector('.jp-NotebookPanel-toolbar [data-status="idle"]')
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()
    page.wait_for_function("[...document.querySelectorAll('.jp-InputPrompt')].some(p => /[*0-9]/.test(p.textContent))")


def wait_until_idle(page, seconds=240):
    """Until every code cell has run. The prompts' text contents, because their inner text is empty off-screen."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        prompts = page.locator(".jp-CodeCell .jp-InputArea-prompt").all_text_contents()
        done = prompts and all(re.search("[0-9]", text) for text in prompts)
        if done and page.locator('[data-status="idle"]').count():
            return
        time.sleep(0.5)
    status = page.locator("[data-status]").first.get_attribute("data-status")
    raise AssertionError(f"the notebook did not end in {seconds} s; kernel {status}; prompts {prompts}")


def screenshot(page, name):
    folder = os.environ.get("A5_SCREENSHOTS")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png")


def test_run_all_and_a_slider_that_changes_its_picture(page, lab):
    open_and_run(page, lab, "04_advantages")
    wait_until_idle(page)
    handle = page.locator(".widget-slider .noUi-handle").first
    handle.wait_for(state="attached")
    assert page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
    handle.scroll_into_view_if_needed()
    picture = page.locator(".widget-image").first
    before = picture.get_attribute("src")
    screenshot(page, "04-before")
    handle.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "before => document.querySelector('.widget-image').src !== before", arg=before, timeout=30_000
    )
    time.sleep(1)
    screenshot(page, "04-after")


def test_the_stop_button_ends_a_training_between_steps(page, lab):
    open_and_run(page, lab, "11_full_training")
    page.locator(".widget-button").first.wait_for(state="attached", timeout=120_000)
    button = page.locator(".widget-button").first
    button.scroll_into_view_if_needed()
    page.wait_for_function("document.querySelector('.widget-html')?.innerText.match(/step [2-9]/i)", timeout=120_000)
    screenshot(page, "11-running")
    button.click()
    # the cell's own source has no number there; by itself it would stop at a third of the 40 steps
    stopped = r"/stopped after step ([2-9]|1[01]); finished: False/"
    page.wait_for_function(f"document.body.innerText.match({stopped})", timeout=60_000)
    screenshot(page, "11-stopped")
