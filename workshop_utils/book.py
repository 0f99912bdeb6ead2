"""The lessons as a web site: `make site`, or `python -m workshop_utils.book`, writes build/site/html/index.html.

Jupyter Book 1 (on Sphinx) makes it from the notebooks as they were executed and runs none of them. It has an
environment of its own. The site needs no server and no network: open index.html; the search works there too.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import yaml

from workshop_utils import lessons
from workshop_utils.environments import Environment, EnvironmentFailed

ENVIRONMENT = Environment("site", "Jupyter Book")
OUTPUT = Path("build/site")
CONFIG = Path("docs/_config.yml")
CONTENTS = Path("docs/_toc.yml")
STYLE = Path("docs/_static")  # Jupyter Book adds the style sheets of a folder with this name
MARKDOWN_LINK = re.compile(r"\]\(<?([^)#?\s>]+)[^)]*\)")
CSS_ADDRESS = re.compile(r"""(?:url\(|@import(?!\s*url))\s*["']?([^"')\s;]+)""")
ADDRESS = re.compile(r"""["'`]((?:https?:)?//[^"'`\s]+)""")  # in a script
FETCHED_LINKS = {"stylesheet", "icon", "preload", "modulepreload"}
PAGE_ENDINGS = (".md", ".ipynb")
SECONDS = 600.0


class SiteBroken(ValueError):
    """A page leads to something that is not there, or needs the network to be shown; the message says which."""


def pages(root: Path) -> list[Path]:
    """The files of the contents, in their order, relative to `root`.

    Raises:
        SiteBroken: if the contents name a page that does not exist.
    """
    contents = yaml.safe_load((root / CONTENTS).read_text(encoding="utf-8"))
    names = [contents["root"], *(entry["file"] for part in contents["parts"] for entry in part["chapters"])]
    found = []
    for name in names:
        files = [Path(name + ending) for ending in PAGE_ENDINGS if (root / (name + ending)).is_file()]
        if not files:
            raise SiteBroken(f"{CONTENTS} names {name!r}, and there is no {name}.md and no {name}.ipynb")
        found.append(files[0])
    return found


def links(root: Path, page: Path) -> Iterator[tuple[str, Path]]:
    """The relative links in the text of a page: each as it is written, and the path from `root` to which it leads."""
    if page.suffix == ".ipynb":
        notebook = nbformat.read(str(root / page), as_version=4)
        text = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    else:
        text = (root / page).read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)  # code is no text
    for link in MARKDOWN_LINK.findall(text):
        if not urlsplit(link).scheme:
            yield link, Path((root / page).parent, unquote(link)).resolve().relative_to(root.resolve())


def gather(root: Path, folder: Path) -> None:
    """Copy the pages, and the files to which they link, into `folder`, laid out as in `root`.

    Raises:
        SiteBroken: if a link leads to nothing, or to a page that the site has not.
    """
    wanted = pages(root)
    for page in wanted:
        target = folder / page
        target.parent.mkdir(parents=True, exist_ok=True)
        if page.suffix == ".ipynb":
            nbformat.write(_prepared(nbformat.read(str(root / page), as_version=4)), str(target))
        else:
            shutil.copyfile(root / page, target)
        for link, path in links(root, page):
            if not (root / path).exists():
                raise SiteBroken(f"{page} links to {link}, which does not exist")
            if path not in wanted and path.suffix in PAGE_ENDINGS:
                raise SiteBroken(f"{page} links to {path}, a page that is not in {CONTENTS}")
            if path not in wanted and (root / path).is_file():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(root / path, folder / path)


def _prepared(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Solutions are folded, and each figure's alternative text goes to where the builder looks for it: at its cell."""
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if lessons.SOLUTION in tags:
            cell.metadata["tags"] = [*tags, "hide-cell"]
        pictures = [output.get("metadata", {}).get("image/png", {}) for output in cell.get("outputs", [])]
        if words := " ".join(picture["alt"] for picture in pictures if picture.get("alt")):
            cell.metadata["mystnb"] = {"image": {"alt": words}}
    return notebook


def build(root: Path, output: Path = OUTPUT) -> Path:
    """Make the site and return its first page.

    Raises:
        EnvironmentFailed: if the builder cannot be had, or complains: a warning of it is a failure.
        SiteBroken: if a link leads nowhere.
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
    if faults := list(broken(html)):
        raise SiteBroken("\n  ".join([f"{len(faults)} links of the site lead nowhere:", *faults[:20]]))
    return html / "index.html"


class _References(HTMLParser):
    """What a page needs to be shown, and where it leads."""

    def __init__(self) -> None:
        super().__init__()
        self.needed: list[str] = []
        self.leads: list[str] = []
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag
        values = {name: value or "" for name, value in attrs}
        if tag == "a":
            self.leads.append(values.get("href", ""))
        elif tag == "link":
            if set(values.get("rel", "").split()) & FETCHED_LINKS:
                self.needed.append(values.get("href", ""))
        else:
            self.needed += [values.get("src", ""), values.get("data", "") if tag == "object" else ""]
        self.needed += CSS_ADDRESS.findall(values.get("style", ""))

    def handle_data(self, data: str) -> None:
        if self.inside == "style":
            self.needed += CSS_ADDRESS.findall(data)
        elif self.inside == "script":
            self.needed += ADDRESS.findall(data)

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""


def needed(page: str) -> list[str]:
    """What a page fetches to be shown, and the addresses that its own scripts name: they may fetch them later."""
    return [
        reference for reference in _parsed(page).needed if reference and not reference.startswith("data:")
    ]


def _parsed(page: str) -> _References:
    references = _References()
    references.feed(page)
    references.close()
    return references


def broken(html: Path) -> Iterator[str]:
    """Each relative link or image of the pages below `html` without a file, and all that they fetch elsewhere.

    What the scripts of the builder's theme fetch when they run is not seen here, only in a browser without a network.
    """
    for sheet in sorted(html.rglob("*.css")):
        for reference in CSS_ADDRESS.findall(sheet.read_text(encoding="utf-8")):
            if urlsplit(reference).netloc:
                yield f"{sheet.relative_to(html)} needs the network: {reference}"
    for page in sorted(html.rglob("*.html")):
        if "_static" in page.relative_to(html).parts:
            continue
        references = _parsed(page.read_text(encoding="utf-8"))
        name = page.relative_to(html)
        for reference in references.needed:
            if urlsplit(reference).netloc:
                yield f"{name} needs the network: {reference}"
        for reference in references.needed + references.leads:
            parts = urlsplit(reference)
            if parts.scheme or parts.netloc or not parts.path:
                continue
            if not (page.parent / unquote(parts.path)).exists():
                yield f"{name}: {reference}"


def main() -> int:
    """Build the site of the checkout in the working folder; returns the exit code."""
    try:
        first = build(Path.cwd())
    except (EnvironmentFailed, SiteBroken) as error:
        print(f"The site could not be made. {error}", file=sys.stderr)
        return 1
    print(f"{first.relative_to(Path.cwd())}: open it in a browser; it needs no server and no network")
    return 0


if __name__ == "__main__":
    sys.exit(main())
