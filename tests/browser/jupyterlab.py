"""A real JupyterLab on a copy of the workshop, and a browser in front of it.

The sources are never written: lessons run in a copy in a temporary folder, and JupyterLab's settings, workspaces and
kernels' notes lie there too. The server listens on loopback alone, with a token, and ends with all that it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import alive
from playwright.sync_api import Browser, Error, Locator, Page, sync_playwright

ROOT = Path(__file__).parents[2]
COPIED = ("notebooks", "jobs", "images", "workshop_utils", "pyproject.toml")
PICTURES = ROOT / "build" / "browser"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
STARTING_SECONDS = 120
PATIENCE_MILLISECONDS = 60_000
OUTPUT = ".jp-OutputArea-output"
# A widget's picture is one, too: the committed notebook has a static one in its place.
FIGURE = f"{OUTPUT} img[src^='data:image/png']"
SETTINGS = {
    # No question about news in a learner's first minute, and every cell in the page at once, so that all can be seen.
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},
}
THEME = "apputils-extension/themes"


def chromium() -> str:
    """The path of the browser: CHROMIUM, or the first of its usual names; without one the tests end with a sentence."""
    wanted = os.environ.get("CHROMIUM")
    found = next(filter(None, map(shutil.which, [wanted] if wanted else CHROMIUM)), None)
    if found is None:
        pytest.exit(
            f"there is no browser {wanted or ', '.join(CHROMIUM)}. Install Chromium (Debian: apt-get install chromium; "
            "Fedora: dnf install chromium; macOS: brew install --cask chromium), or name its program in CHROMIUM",
            returncode=1,
        )
    return found


class Lab:
    """A running JupyterLab whose files lie in `folder`, and whose browser is `browser`."""

    def __init__(self, folder: Path, url: str, token: str, server: subprocess.Popen[bytes], browser: Browser):
        self.folder = folder
        self.url = url
        self.token = token
        self.server = server
        self.browser = browser

    def use_theme(self, name: str) -> None:
        """Show what is opened from now on in this theme, such as "JupyterLab Dark"."""
        _write_setting(self.folder, THEME, {"theme": name})

    def processes(self) -> list[psutil.Process]:
        """All that the server has started and that is alive: kernels, and what runs in them."""
        try:
            found = psutil.Process(self.server.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [process for process in found if alive(process.pid)]

    @contextlib.contextmanager
    def notebook(self, path: str, width: int = 1280, height: int = 900) -> Iterator[Notebook]:
        """Open a notebook of the folder in a window of this size; its kernel and the window are closed after."""
        context = self.browser.new_context(viewport={"width": width, "height": height})
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MILLISECONDS)
        try:
            page.goto(f"{self.url}/lab/workspaces/{secrets.token_hex(4)}/tree/{path}?token={self.token}")
            page.wait_for_selector(".jp-Notebook .jp-CodeCell")
            opened = Notebook(page)
            # The page says "idle" before it has a kernel at all; the server knows.
            opened.until(self._has_kernel, STARTING_SECONDS, "the notebook's kernel")
            opened.until(opened.kernel_is_idle, STARTING_SECONDS, "the kernel to be idle")
            yield opened
        except BaseException:
            with contextlib.suppress(Error):  # what is to be raised is what failed before
                PICTURES.mkdir(parents=True, exist_ok=True)
                page.screenshot(path=str(PICTURES / f"failed-{Path(path).stem}.png"))
            raise
        finally:
            context.close()
            for session in self._api("sessions"):
                self._api(f"sessions/{session['id']}", "DELETE")

    def _has_kernel(self) -> bool:
        kernels = [session["kernel"] for session in self._api("sessions")]
        return any(
            kernel and kernel["execution_state"] == "idle" and kernel["connections"] for kernel in kernels
        )

    def _api(self, what: str, method: str = "GET") -> Any:
        request = urllib.request.Request(
            f"{self.url}/api/{what}", method=method, headers={"Authorization": f"token {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or b"null")


class Notebook:
    """A notebook in the browser; what a learner does with it, and what they see."""

    def __init__(self, page: Page):
        self.page = page

    # What a learner does.

    def menu(self, *path: str) -> None:
        """Choose from the menu bar, such as menu("Run", "Run All Cells")."""
        self.page.locator(f".lm-MenuBar-itemLabel:text-is('{path[0]}')").click()
        for label in path[1:]:
            pattern = re.compile(rf"^{re.escape(label)}(…|\.\.\.)?$")
            item = self.page.locator(".lm-Menu-itemLabel").filter(has_text=pattern)
            item.locator("visible=true").last.click()

    def run_cell(self, index: int) -> None:
        """Run one code cell, by a click into it and Shift+Enter, and wait until it has begun."""
        before = self.prompts()[index]
        self.cells.nth(index).locator(".cm-content").click()
        self.page.keyboard.press("Shift+Enter")
        self.until(lambda: self.prompts()[index] != before, 60, "the cell to begin")

    # What is there.

    @property
    def cells(self) -> Locator:
        """The code cells."""
        return self.page.locator(".jp-Notebook .jp-CodeCell")

    def prompts(self) -> list[str]:
        """What stands before each code cell: `[ ]:`, `[*]:` while it runs or waits, `[7]:` after."""
        return self.page.locator(".jp-Notebook .jp-CodeCell .jp-InputPrompt").all_inner_texts()

    def kernel_is_idle(self) -> bool:
        return bool(self.page.locator(".jp-Notebook-ExecutionIndicator[data-status='idle']").count())

    def wait_until_done(self, seconds: float) -> None:
        """Wait until no cell runs or waits any more; a folded one shows no prompt, so the kernel must be idle, too."""

        def done() -> bool:
            return "[*]:" not in self.prompts() and self.kernel_is_idle()

        def done_for_good() -> bool:
            if done():
                self.page.wait_for_timeout(500)  # between two cells a kernel is idle for a moment
            return done()

        self.until(done_for_good, seconds, "the last cell to end")

    def hide_files(self) -> None:
        """Close the list of files at the left, as whoever reads in a narrow window does."""
        self.page.keyboard.press("Control+b")
        self.page.wait_for_selector(".jp-FileBrowser", state="hidden")

    def errors(self) -> list[str]:
        """The text of every output that is an error or was written to standard error."""
        kinds = ("application/vnd.jupyter.stderr", "application/vnd.jupyter.error")
        chosen = ", ".join(f"{OUTPUT}[data-mime-type='{kind}']" for kind in kinds)
        return self.page.locator(chosen).all_inner_texts()

    def figures(self) -> list[dict[str, Any]]:
        """Of each figure its alternative text, its size, and how far it reaches beyond its cell, in pixels."""
        found: list[dict[str, Any]] = self.page.locator(FIGURE).evaluate_all(
            """images => images.map(image => {
                const box = image.getBoundingClientRect();
                const cell = image.closest('.jp-Cell').getBoundingClientRect();
                return {alt: image.alt, pixels: image.naturalWidth, width: box.width, height: box.height,
                        beyond: box.right - cell.right};
            })"""
        )
        return found

    def verdicts(self) -> list[str]:
        """What the checks of exercises said, in order."""
        texts = self.page.locator(f".jp-CodeCell {OUTPUT}").all_inner_texts()
        return [text.strip() for text in texts if re.match(r"(Right|Wrong|Not yet|Answered): ", text.strip())]

    def output(self, index: int) -> str:
        """All text below the code cell of this index."""
        return "\n".join(self.cells.nth(index).locator(OUTPUT).all_inner_texts())

    def photograph(self, folder: Path, name: str) -> None:
        """Keep what a reader sees, window after window, as NAME-01.png and so on."""
        width = self.page.viewport_size["width"] if self.page.viewport_size else 1280
        self.page.set_viewport_size({"width": width, "height": 2400})
        scroll = self.page.locator(".jp-WindowedPanel-outer").first
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"{name}-*.png"):
            old.unlink()
        height = scroll.evaluate("panel => panel.scrollHeight")
        visible = scroll.evaluate("panel => panel.clientHeight")
        for number, top in enumerate(range(0, height, visible), start=1):
            scroll.evaluate("(panel, top) => panel.scrollTo(0, top)", top)
            scroll.screenshot(path=str(folder / f"{name}-{number:02}.png"))

    def until(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        """Wait until `condition` is true; AssertionError, which says for `what`, after `seconds`."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {seconds:g} s for {what}; the prompts are {self.prompts()}")
            self.page.wait_for_timeout(200)


def playables(page: Page) -> list[dict[str, Any]]:
    """Of each figure to play with on a page, what its sliders are called, and which change what is drawn.

    Each slider is moved by keyboard, five steps to the right, or to the left where it stands at its end: with Shift,
    since JupyterLab takes the arrows alone for itself.
    """
    found = []
    for place in page.locator(".vega-embed").all():
        drawing = place.locator("canvas, svg.marks").first
        sliders = {}
        for slider in place.locator("input[type=range]").all():
            name = slider.locator("xpath=..").inner_text().strip()
            before = drawing.screenshot()
            at_end = slider.evaluate("input => Number(input.value) >= Number(input.max)")
            slider.focus()
            for _ in range(5):
                page.keyboard.press("Shift+ArrowLeft" if at_end else "Shift+ArrowRight")
            page.wait_for_timeout(300)
            sliders[name] = drawing.screenshot() != before
        found.append({"sliders": sliders, "width": drawing.bounding_box()["width"]})
    return found


@contextlib.contextmanager
def running_lab(folder: Path) -> Iterator[Lab]:
    """A JupyterLab on a copy of the workshop in `folder`, and a browser; both end with the block."""
    program = chromium()
    for name in COPIED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy2(ROOT / name, folder / name)
    for setting, value in SETTINGS.items():
        _write_setting(folder, setting, value)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    with _server(folder, port, token) as server:
        url = f"http://127.0.0.1:{port}"
        _wait_for(server, url, folder)
        with sync_playwright() as playwright:
            # A root's Chromium has no sandbox; what it opens is our own.
            browser = playwright.chromium.launch(
                executable_path=program, args=["--no-sandbox", "--disable-gpu"], timeout=120_000
            )
            try:
                yield Lab(folder, url, token, server, browser)
            finally:
                with contextlib.suppress(Error):  # it may be the browser that failed
                    browser.close()


@contextlib.contextmanager
def _server(folder: Path, port: int, token: str) -> Iterator[subprocess.Popen[bytes]]:
    own = folder / ".jupyter"
    variables = os.environ | {
        "JUPYTER_TOKEN": token,
        "JUPYTER_CONFIG_DIR": str(own / "config"),
        "JUPYTER_DATA_DIR": str(own / "data"),
        "JUPYTER_RUNTIME_DIR": str(own / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(own / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(own / "workspaces"),
        "IPYTHONDIR": str(own / "ipython"),
        "JUPYTER_PREFER_ENV_PATH": "1",
        "WORKSHOP_SIZE": os.environ.get("WORKSHOP_SIZE", "small"),
        # The copy's own package, not the one that is installed from the sources.
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root"]
    options = {"ip": "127.0.0.1", "port": port, "port_retries": 0, "root_dir": folder}
    command += [f"--ServerApp.{name}={value}" for name, value in options.items()]
    with (folder / "jupyterlab.log").open("wb") as log:
        server = subprocess.Popen(
            command, cwd=folder, env=variables, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield server
    finally:
        started = psutil.Process(server.pid).children(recursive=True) if server.poll() is None else []
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
        for process in psutil.wait_procs(started, timeout=30)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _wait_for(server: subprocess.Popen[bytes], url: str, folder: Path) -> None:
    deadline = time.monotonic() + STARTING_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{url}/api", timeout=10).close()
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                end = (folder / "jupyterlab.log").read_text(errors="replace")[-2000:]
                raise AssertionError(f"JupyterLab did not start:\n{end}") from None
            time.sleep(0.2)


def _write_setting(folder: Path, name: str, value: dict[str, Any]) -> None:
    file = folder / ".jupyter" / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value))
