"""The lessons as a web site: `make site` writes build/site/html/index.html.

Jupyter Book 1 (on Sphinx) builds it from the executed notebooks and runs none of them. It has an environment of its
own. The site needs neither a server nor a network, not even for its search: open index.html.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import yaml

from workshop_utils.lessons import selection
from workshop_utils.setup.environments import Environment
from workshop_utils.setup.logged_command import SetupError

ENVIRONMENT = Environment("site", "Jupyter Book")
OUTPUT = Path("build/site")
CONFIG = Path("docs/_config.yml")
CONTENTS = Path("docs/_toc.yml")
STYLE = Path("docs/_static")  # Jupyter Book adds the style sheets of a folder with this name
MARKDOWN_LINK = re.compile(r"\]\(<?([^)#?\s>]+)[^)]*\)")
SECONDS = 600.0


def links(root: Path, page: Path) -> Iterator[tuple[str, Path]]:
    """The relative links in the text of a page, each with its target's path from `root`."""
    if page.suffix == ".ipynb":
        notebook = selection.read_notebook(root / page)
        text = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    else:
        text = (root / page).read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)  # code has no links
    for link in MARKDOWN_LINK.findall(text):
        if not urlsplit(link).scheme:
            yield link, Path((root / page).parent, unquote(link)).resolve().relative_to(root.resolve())


def gather(root: Path, folder: Path) -> None:
    """Copy the pages of the contents, and the files that they link to, into `folder`, laid out as in `root`.

    Missing files and pages outside the contents are not copied: the builder then reports who links to them.
    """
    contents = yaml.safe_load((root / CONTENTS).read_text(encoding="utf-8"))
    names = [contents["root"], *(entry["file"] for part in contents["parts"] for entry in part["chapters"])]
    pages = [page for name in names for page in (Path(f"{name}.md"), Path(f"{name}.ipynb"))]
    for page in filter(lambda page: (root / page).is_file(), pages):
        linked = [path for _, path in links(root, page) if path.suffix not in (".md", ".ipynb")]
        for path in (page, *linked):
            if (root / path).is_file():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(root / path, folder / path)
        if page.suffix == ".ipynb":
            nbformat.write(_prepared(selection.read_notebook(root / page)), str(folder / page))


def _prepared(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Fold solutions, and put each figure's alternative text where the builder looks for it: at its cell."""
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
    arguments = ["build", str(source), "--path-output", str(root / output), "-W", "--keep-going", "--quiet"]
    ENVIRONMENT.run("jupyter-book", *arguments, timeout_seconds=SECONDS, variables={"NO_COLOR": "1"})
    (root / output / "_build" / "html").rename(html)
    return html / "index.html"


def main() -> int:
    """Build the site of the checkout in the working folder; return the exit code."""
    try:
        page = build_site(Path.cwd())
    except SetupError as error:
        print(f"The site could not be built. {error}", file=sys.stderr)
        return 1
    print(f"{page.relative_to(Path.cwd())}: open it in a browser; it needs no server and no network")
    return 0


if __name__ == "__main__":
    sys.exit(main())
