"""The lessons as a web site: `make site` writes build/site/html/index.html.

Jupyter Book 1 (on Sphinx) makes it from the notebooks as they were executed and runs none of them. It has an
environment of its own. The site needs no server and no network: open index.html; the search works there too.
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
from bs4 import BeautifulSoup

from workshop_utils.lessons import selection
from workshop_utils.setup.environments import Environment, EnvironmentFailed

ENVIRONMENT = Environment("site", "Jupyter Book")
OUTPUT = Path("build/site")
CONFIG = Path("docs/_config.yml")
CONTENTS = Path("docs/_toc.yml")
STYLE = Path("docs/_static")  # Jupyter Book adds the style sheets of a folder with this name
MARKDOWN_LINK = re.compile(r"\]\(<?([^)#?\s>]+)[^)]*\)")
CSS_ADDRESS = re.compile(r"""(?:url\(|@import(?!\s*url))\s*["']?([^"')\s;]+)""")
ADDRESS = re.compile(r"""["'`]((?:https?:)?//[^"'`\s]+)""")  # in a script
FETCHED_LINKS = ",".join(f"link[rel~={kind}]" for kind in ("stylesheet", "icon", "preload", "modulepreload"))
SECONDS = 600.0


class SiteBroken(ValueError):
    """A page leads to something that is not there, or needs the network to be shown; the message says which."""


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
    """Copy the pages of the contents, and the files to which they link, into `folder`, laid out as in `root`.

    What is not there, or is no page of the contents, is not copied: the builder then says which page names it.
    """
    contents = yaml.safe_load((root / CONTENTS).read_text(encoding="utf-8"))
    names = [contents["root"], *(entry["file"] for part in contents["parts"] for entry in part["chapters"])]
    pages = [page for name in names for page in (Path(f"{name}.md"), Path(f"{name}.ipynb"))]
    for page in pages:
        if not (root / page).is_file():
            continue
        linked = [path for _, path in links(root, page) if path.suffix not in (".md", ".ipynb")]
        for path in (page, *linked):
            if (root / path).is_file():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(root / path, folder / path)
        if page.suffix == ".ipynb":
            nbformat.write(_prepared(selection.read(root / page)), str(folder / page))


def _prepared(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Solutions are folded, and each figure's alternative text goes to where the builder looks for it: at its cell."""
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if selection.SOLUTION in tags:
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


def needed(page: str) -> list[str]:
    """What a page fetches to be shown, and the addresses that its own scripts name: they may fetch them later."""
    html = BeautifulSoup(page, "html.parser")
    references = [str(element["src"]) for element in html.select("[src]")]
    references += [str(element["data"]) for element in html.select("object[data]")]
    references += [str(element.get("href", "")) for element in html.select(FETCHED_LINKS)]
    for css in (*(each.text for each in html("style")), *(each["style"] for each in html.select("[style]"))):
        references += CSS_ADDRESS.findall(str(css))
    for script in html("script"):
        references += ADDRESS.findall(script.text)
    return [reference for reference in references if reference and not reference.startswith("data:")]


def broken(html: Path) -> Iterator[str]:
    """Each relative link or image of the pages below `html` without a file, and all that they fetch elsewhere.

    What the scripts of the builder's theme fetch when they run is not seen here, only in a browser without a network.
    """
    for file in sorted((*html.rglob("*.css"), *html.rglob("*.html"))):
        name, text = file.relative_to(html), file.read_text(encoding="utf-8")
        if file.suffix == ".html" and "_static" in name.parts:
            continue
        fetched = needed(text) if file.suffix == ".html" else CSS_ADDRESS.findall(text)
        yield from (f"{name} needs the network: {address}" for address in fetched if urlsplit(address).netloc)
        if file.suffix == ".html":
            links = [str(anchor["href"]) for anchor in BeautifulSoup(text, "html.parser").select("a[href]")]
            for reference in map(urlsplit, fetched + links):
                is_local = reference.path and not (reference.scheme or reference.netloc)
                if is_local and not (file.parent / unquote(reference.path)).exists():
                    yield f"{name}: {reference.geturl()}"


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
