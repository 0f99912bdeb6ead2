"""The lessons as a web site: `make site` writes build/site/html/index.html.

Jupyter Book 1 (on Sphinx) builds it from the executed notebooks and runs none of them. It has an environment of its
own. The site needs neither a server nor a network, not even for its search: open index.html.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import nbformat

from workshop_utils.lessons import selection
from workshop_utils.plots import playable
from workshop_utils.setup.environments import Environment
from workshop_utils.setup.logged_command import SetupError

ENVIRONMENT = Environment("site", "Jupyter Book")
OUTPUT = Path("build/site")
CONFIG = Path("docs/_config.yml")
CONTENTS = Path("docs/_toc.yml")
STYLE = Path("docs/_static")  # Jupyter Book adds the style sheets of a folder with this name
PLAYER = "player.js"  # in it
LEFT_OUT = (".*", "__pycache__", "build", "my_lessons", "tests", "workshop_utils")
SECONDS = 600.0


def gather(root: Path, folder: Path) -> None:
    """Copy the checkout `root`, without the package and its tests, into `folder`, and prepare its lessons."""
    shutil.copytree(root, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
    for lesson in (folder / selection.NOTEBOOKS).glob("*.ipynb"):
        nbformat.write(_prepared(selection.read_notebook(lesson)), str(lesson))


def _prepared(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Fold solutions, and put each figure's alternative text where the builder looks for it: at its cell."""
    playable.play_in_page(notebook, f'<script src="../_static/{PLAYER}"></script>')
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if selection.SOLUTION in tags:
            cell.metadata["tags"] = [*tags, "hide-cell"]
        pictures = [output.get("metadata", {}).get("image/png", {}) for output in cell.get("outputs", [])]
        if words := " ".join(picture["alt"] for picture in pictures if picture.get("alt")):
            cell.metadata["mystnb"] = {"image": {"alt": words}}
    return notebook


def build_site(root: Path, output: Path = OUTPUT) -> Path:
    """Build the site and return its first page.

    Raises:
        SetupError: if the builder is not available, or warns of something, for example of a broken link.
    """
    source, html = root / output / "source", root / output / "html"
    for folder in (source, html, root / output / "_build"):
        shutil.rmtree(folder, ignore_errors=True)
    gather(root, source)
    for file in (CONFIG, CONTENTS):
        shutil.copyfile(root / file, source / file.name)
    shutil.copytree(root / STYLE, source / STYLE.name)
    (source / STYLE.name / PLAYER).write_text(playable.player(), encoding="utf-8")
    arguments = ["build", str(source), "--path-output", str(root / output), "-W", "--keep-going", "--quiet"]
    ENVIRONMENT.run("jupyter-book", *arguments, timeout_seconds=SECONDS, variables={"NO_COLOR": "1"})
    (root / output / "_build" / "html").rename(html)
    return html / "index.html"


def main() -> int:
    """Build the site of the checkout in the working folder; return the exit code."""
    try:
        first = build_site(Path.cwd())
    except SetupError as error:
        print(f"The site could not be built. {error}", file=sys.stderr)
        return 1
    print(f"{first.relative_to(Path.cwd())}: open it in a browser; it needs no server and no network")
    return 0


if __name__ == "__main__":
    sys.exit(main())
