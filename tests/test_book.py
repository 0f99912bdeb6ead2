"""The site: its contents are all lessons in order, its pages lead somewhere, and nothing of it is fetched elsewhere."""

import re
from pathlib import Path

import nbformat
import pytest
import yaml
from packaging.version import Version

from workshop_utils import book
from workshop_utils.environments import REQUIREMENTS

ROOT = Path(__file__).parents[1]


@pytest.fixture
def small(tmp_path):
    """A checkout of one page and one lesson, whose exercise has a solution."""
    root = tmp_path / "checkout"
    (root / "docs").mkdir(parents=True)
    (root / "notebooks").mkdir()
    contents = {"root": "README", "parts": [{"chapters": [{"file": "notebooks/00_lesson"}]}]}
    (root / book.CONTENTS).write_text(yaml.safe_dump(contents))
    (root / "README.md").write_text(
        "# All\n\n[one](notebooks/00_lesson.ipynb) ![two](picture.svg) `[no](link)`\n"
    )
    (root / "picture.svg").write_text("<svg/>")
    cells = [
        nbformat.v4.new_markdown_cell("# Lesson\n\n[back](../README.md#all)"),
        nbformat.v4.new_code_cell("1 + 1", metadata={"tags": ["solution"]}),
        nbformat.v4.new_code_cell("1 + 2"),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), str(root / "notebooks" / "00_lesson.ipynb"))
    return root


def test_the_contents_are_all_lessons_in_their_order():
    lessons = [page for page in book.pages(ROOT) if page.suffix == ".ipynb"]
    assert lessons == [Path("notebooks") / path.name for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]


def test_a_page_that_the_contents_name_and_that_does_not_exist_is_named(small):
    (small / "README.md").unlink()
    with pytest.raises(book.SiteBroken, match=r"names 'README', and there is no README\.md"):
        book.pages(small)


def test_pages_and_pictures_are_gathered_and_solutions_folded(small, tmp_path):
    book.gather(small, tmp_path / "source")
    found = {str(path.relative_to(tmp_path / "source")) for path in (tmp_path / "source").rglob("*.*")}
    assert found == {"README.md", "picture.svg", "notebooks/00_lesson.ipynb"}
    gathered = nbformat.read(str(tmp_path / "source" / "notebooks" / "00_lesson.ipynb"), as_version=4)
    assert [cell.metadata.get("tags") for cell in gathered.cells] == [None, ["solution", "hide-cell"], None]


def test_a_figure_keeps_its_alternative_text(small, tmp_path):
    path = small / "notebooks" / "00_lesson.ipynb"
    notebook = nbformat.read(str(path), as_version=4)
    picture = nbformat.v4.new_output(
        "display_data", {"image/png": "aaaa"}, metadata={"image/png": {"alt": "A line."}}
    )
    notebook.cells[2].outputs = [picture]
    nbformat.write(notebook, str(path))
    book.gather(small, tmp_path / "source")
    gathered = nbformat.read(str(tmp_path / "source" / "notebooks" / "00_lesson.ipynb"), as_version=4)
    assert [cell.metadata.get("mystnb") for cell in gathered.cells] == [
        None,
        None,
        {"image": {"alt": "A line."}},
    ]


def test_a_link_to_nothing_is_named_with_its_page(small, tmp_path):
    (small / "picture.svg").unlink()
    with pytest.raises(book.SiteBroken, match=r"README\.md links to picture\.svg, which does not exist"):
        book.gather(small, tmp_path / "source")


def test_a_link_to_a_page_that_the_site_has_not_is_named(small, tmp_path):
    (small / "picture.svg").rename(small / "other.md")
    (small / "README.md").write_text("# All\n\n[other](other.md)\n")
    with pytest.raises(book.SiteBroken, match=r"links to other\.md, a page that is not in docs/_toc\.yml"):
        book.gather(small, tmp_path / "source")


def test_a_site_in_which_all_leads_somewhere_has_no_faults(tmp_path):
    (tmp_path / "a b.html").write_text('<a href="#here"></a><a href="https://example.org">elsewhere</a>')
    (tmp_path / "index.html").write_text(
        '<a href="a%20b.html#here"></a><script src="a%20b.html?v=1"></script>'
    )
    assert list(book.broken(tmp_path)) == []


@pytest.mark.parametrize(
    ("html", "fault"),
    [
        ('<a href="gone.html#x">', "index.html: gone.html#x"),
        ('<img src="_images/gone.png">', "index.html: _images/gone.png"),
        (
            '<script src="https://cdn.example.org/x.js">',
            "index.html needs the network: https://cdn.example.org/x.js",
        ),
        (
            '<link rel="stylesheet" href="//example.org/x.css">',
            "index.html needs the network: //example.org/x.css",
        ),
        (
            '<style>@import "https://example.org/x.css";</style>',
            "index.html needs the network: https://example.org/x.css",
        ),
        (
            '<style>@import url("https://example.org/x.css");</style>',
            "index.html needs the network: https://example.org/x.css",
        ),
        (
            '<p style="background: url(//example.org/x.png)">',
            "index.html needs the network: //example.org/x.png",
        ),
        (
            '<script>const later = "https://example.org/x.js"</script>',
            "index.html needs the network: https://example.org/x.js",
        ),
        (
            '<iframe src="https://example.org/"></iframe>',
            "index.html needs the network: https://example.org/",
        ),
    ],
)
def test_what_leads_nowhere_or_to_the_network_is_a_fault(html, fault, tmp_path):
    (tmp_path / "index.html").write_text(html)
    assert list(book.broken(tmp_path)) == [fault]


def test_a_style_sheet_that_fetches_from_elsewhere_is_a_fault(tmp_path):
    (tmp_path / "_static").mkdir()
    (tmp_path / "_static" / "site.css").write_text(
        '@font-face { src: url("https://example.org/x.woff2"), url(x.woff) }'
    )
    assert list(book.broken(tmp_path)) == ["_static/site.css needs the network: https://example.org/x.woff2"]


def test_the_site_shows_what_was_executed_and_executes_nothing():
    config = yaml.safe_load((ROOT / book.CONFIG).read_text())
    assert config["execute"] == {"execute_notebooks": "off"}
    assert config["only_build_toc_files"] is True


def test_the_site_s_formulas_are_drawn_from_its_own_files_and_nothing_is_run_elsewhere():
    extensions = yaml.safe_load((ROOT / book.CONFIG).read_text())["sphinx"]["config"]["extensions"]
    assert "sphinx-mathjax-offline" in extensions
    assert "sphinx_thebe" not in extensions


def test_the_builder_is_the_one_that_fetches_nothing_while_it_builds():
    lock = (REQUIREMENTS / "site.txt").read_text()
    (version,) = re.findall(r"^jupyter-book==(\S+)", lock, flags=re.MULTILINE)
    assert Version("1") <= Version(version) < Version("2")
    assert "sphinx-mathjax-offline==" in lock
    loose = [
        line for line in lock.splitlines() if line and not line.lstrip().startswith("#") and "==" not in line
    ]
    assert loose == []


def test_a_failure_is_said_in_a_sentence(small, monkeypatch, capsys):
    (small / "picture.svg").unlink()
    monkeypatch.chdir(small)
    assert book.main() == 1
    assert capsys.readouterr().err.startswith("The site could not be made. README.md links to picture.svg")
