"""The site has all lessons in order, with their pictures, and runs none of them."""

import re
from pathlib import Path

import nbformat
import pytest
import yaml

from workshop_utils.lessons import site
from workshop_utils.plots import playable

ROOT = Path(__file__).parents[2]


@pytest.fixture
def small(tmp_path):
    """A checkout of one page and one lesson, whose exercise has a solution and a figure."""
    root = tmp_path / "checkout"
    (root / "docs").mkdir(parents=True)
    (root / "notebooks").mkdir()
    contents = {"root": "README", "parts": [{"chapters": [{"file": "notebooks/00_lesson"}]}]}
    (root / site.CONTENTS).write_text(yaml.safe_dump(contents))
    (root / "README.md").write_text(
        "# All\n\n[one](notebooks/00_lesson.ipynb) ![two](picture.svg) `[no](link)`\n"
    )
    (root / "picture.svg").write_text("<svg/>")
    picture = nbformat.v4.new_output(
        "display_data", {"image/png": "aaaa"}, metadata={"image/png": {"alt": "A line."}}
    )
    cells = [
        nbformat.v4.new_markdown_cell("# Lesson\n\n[back](../README.md#all)"),
        nbformat.v4.new_code_cell("1 + 1", metadata={"tags": ["solution"]}),
        nbformat.v4.new_code_cell("1 + 2", outputs=[picture]),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), str(root / "notebooks" / "00_lesson.ipynb"))
    return root


def test_the_contents_are_all_lessons_in_their_order():
    contents = yaml.safe_load((ROOT / site.CONTENTS).read_text())
    pages = [entry["file"] for part in contents["parts"] for entry in part["chapters"]]
    lessons = [f"notebooks/{path.stem}" for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    assert [page for page in pages if page.startswith("notebooks/")] == lessons


def test_pages_and_pictures_are_gathered_solutions_folded_and_figures_described(small, tmp_path):
    site.gather(small, tmp_path / "source")
    gathered = {str(path.relative_to(tmp_path / "source")) for path in (tmp_path / "source").rglob("*.*")}
    assert gathered == {"README.md", "docs/_toc.yml", "picture.svg", "notebooks/00_lesson.ipynb"}
    lesson = nbformat.read(str(tmp_path / "source" / "notebooks" / "00_lesson.ipynb"), as_version=4)
    assert [cell.metadata.get("tags") for cell in lesson.cells] == [None, ["solution", "hide-cell"], None]
    described = {"image": {"alt": "A line."}}
    assert [cell.metadata.get("mystnb") for cell in lesson.cells] == [None, None, described]


def test_the_site_executes_nothing_and_has_its_formulas_drawn_from_its_own_files():
    config = yaml.safe_load((ROOT / site.CONFIG).read_text())
    assert config["execute"] == {"execute_notebooks": "off"}
    extensions = config["sphinx"]["config"]["extensions"]
    assert "sphinx-mathjax-offline" in extensions
    assert "sphinx_thebe" not in extensions  # it fetches from elsewhere


def test_the_first_figure_to_play_with_on_a_page_loads_the_player(small, tmp_path):
    path = small / "notebooks" / "00_lesson.ipynb"
    lesson = nbformat.read(str(path), as_version=4)
    data = {playable.SPECIFICATION: {"mark": "line"}, "image/png": "aaaa", "text/plain": "A line."}
    lesson.cells += [
        nbformat.v4.new_code_cell("2", outputs=[nbformat.v4.new_output("display_data", dict(data))])
        for _ in range(2)
    ]
    nbformat.write(lesson, str(path))
    site.gather(small, tmp_path / "source")
    cells = nbformat.read(str(tmp_path / "source" / "notebooks" / "00_lesson.ipynb"), as_version=4).cells[-2:]
    pages = [cell.outputs[0].data["text/html"] for cell in cells]
    assert [f'src="../_static/{site.PLAYER}"' in each for each in pages] == [True, False]
    assert all("vegaEmbed(" in each for each in pages)


def test_every_link_of_a_page_leads_to_something_that_the_site_has(tmp_path):
    site.gather(ROOT, tmp_path / "source")
    broken = []
    for page in [*(tmp_path / "source").glob("docs/*.md"), *(tmp_path / "source").glob("notebooks/*.ipynb")]:
        cells = nbformat.read(str(page), as_version=4).cells if page.suffix == ".ipynb" else []
        text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown") or page.read_text()
        links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
        broken += [f"{page.name}: {link}" for link in links if not (page.parent / link).exists()]
    assert not broken
