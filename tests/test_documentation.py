"""What the documentation says exists: commands, options, targets, files, links; and who wrote it can be cited."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import nbformat
import pytest
import typer
import yaml

from workshop_utils import book, cli, jobs
from workshop_utils.launchers.places import PLACES

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
FOLDERS = sorted(path for path in (ROOT / "jobs").rglob("*.md") if "build" not in path.parts)
TEACHING = sorted((ROOT / "notebooks").glob("teaching/*.md"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MINUTES = {
    "about half a minute": "½",
    "about a minute": "1",
    "a minute or two": "2",
    "about two minutes": "2",
    "about two minutes and a half": "3",
    "two to three minutes": "3",
    "about three minutes": "3",
    "three to four minutes": "4",
    "a quarter of an hour": "15",
    "half an hour": "30",
    "forty minutes": "40",
    "three quarters of an hour": "45",
    "45 minutes": "45",
}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def shell_blocks(page: Path) -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def shell_lines(page: Path) -> list[str]:
    """Commands of a page, with continued lines in one, and `inline` ones in tables among them."""
    lines = [line for block in shell_blocks(page) for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(
        r"`((?:make|\.venv/bin/workshop|workshop|python -m) [^`]+)`", page.read_text().replace("\n", " ")
    )
    return [part.strip() for line in lines for part in line.split("&&")]


def words_of(line: str) -> list[str]:
    return shlex.split(line, comments=True)


# Links


@pytest.mark.parametrize("page", [*PAGES, *FOLDERS, *TEACHING, *NOTEBOOKS], ids=name_of)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for link, path in book.links(ROOT, page.relative_to(ROOT)):
        assert (ROOT / path).exists(), f"{name_of(page)} links to {link}"


def test_links_are_found_where_they_stand(tmp_path: Path) -> None:
    text = "[a](b.md#c) ![d](e%20f.svg) `[no](no)` [web](https://example.org)\n```sh\n[no](no)\n```\n[last](../x)\n"
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text(text)
    found = list(book.links(tmp_path, Path("docs/page.md")))
    assert found == [
        ("b.md", Path("docs/b.md")),
        ("e%20f.svg", Path("docs/e f.svg")),
        ("../x", Path("x")),
    ]


@pytest.mark.parametrize("page", [*PAGES, *FOLDERS], ids=name_of)
def test_paths_in_the_text_exist(page: Path) -> None:
    words = re.findall(
        r"`((?:jobs|docs|images|notebooks|tests|workshop_utils|\.devcontainer)/[\w./*-]*)`", page.read_text()
    )
    for word in words:
        path = word.rstrip("/")
        if not re.search(r"/(NN_|NAME|LESSON|SUBJECT)", path):
            assert list(ROOT.glob(path)), f"{name_of(page)} names {word}"


# Commands


@pytest.mark.parametrize("page", [*PAGES, *FOLDERS], ids=name_of)
def test_shell_blocks_are_valid(page: Path) -> None:
    for block in shell_blocks(page):
        answer = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True, check=False)
        assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize("page", [*PAGES, *FOLDERS], ids=name_of)
def test_make_targets_and_modules_that_are_named_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for line in shell_lines(page):
        words = [word for word in words_of(line) if not re.match(r"[A-Z_]+=", word)]
        if words[:1] == ["make"] and len(words) > 1:
            assert words[1] in targets, f"{name_of(page)}: {line}"
        if words[:2] == ["python", "-m"] and words[2].startswith("workshop_utils"):
            path = ROOT / words[2].replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), line


def commands() -> dict[str, Any]:
    """All commands of `workshop` with their options, such as `scaling measure`."""
    found: dict[str, Any] = {}
    todo = [("", typer.main.get_command(cli.app))]
    while todo:
        name, command = todo.pop()
        inner = getattr(command, "commands", None)
        found[name] = set()
        if inner is None:
            found[name] = {
                option
                for parameter in command.params
                for option in (*parameter.opts, *parameter.secondary_opts)
            }
        else:
            todo += [(f"{name} {key}".strip(), value) for key, value in inner.items()]
    return found


@pytest.mark.parametrize("page", [*PAGES, *FOLDERS], ids=name_of)
def test_workshop_commands_and_their_options_exist(page: Path) -> None:
    known = commands()
    assert "launch" in known
    for line in shell_lines(page):
        words = words_of(line)
        if not words or Path(words[0]).name != "workshop" or len(words) == 1:
            continue
        called = next((" ".join(words[1:end]) for end in (3, 2) if " ".join(words[1:end]) in known), None)
        assert called is not None, f"{name_of(page)}: {line}"
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert options <= known[called] | {"--help"}, f"{name_of(page)}: {line}"


def test_the_readme_s_table_of_places_has_them_all_and_only_options_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    table = text[text.index("| where |") : text.index("With `--render`")]
    assert set(re.findall(r"--on ([\w-]+)", table)) | {"local"} == set(PLACES)
    assert set(re.findall(r"`(--[\w-]+)", table)) <= commands()["launch"]


def test_the_readme_s_table_of_strategies_has_them_all_each_with_a_job_that_uses_it() -> None:
    text = (ROOT / "README.md").read_text()
    table = text[text.index("| strategy |") : text.index("How far does it scale")]
    shown: dict[str, str] = {}
    for row in table.splitlines()[2:]:
        cells = [re.findall(r"`([\w/]+)`", cell) for cell in row.split("|")]
        if len(cells) > 3:
            shown |= dict(zip(cells[1], cells[3], strict=True))
    assert set(shown) == set(jobs.StrategyName.__args__)  # type: ignore[attr-defined]
    for strategy, folder in shown.items():
        assert jobs.TrainingJob.load(ROOT / folder).strategy == strategy


# The lessons


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_readme_has_a_row_for_each_lesson_with_the_times_that_its_first_cell_says(path: Path) -> None:
    rows = [
        row for row in (ROOT / "README.md").read_text().splitlines() if f"](notebooks/{path.name})" in row
    ]
    assert len(rows) == 1
    first = nbformat.read(str(path), as_version=4).cells[0].source
    ((reading, running),) = re.findall(r"\*\*Takes\*\* (.*?) to read; running all of it, (.*?)[.,]", first)
    assert {reading, running} <= MINUTES.keys(), "a way of saying a time that MINUTES does not know yet"
    assert rows[0].endswith(f"| {MINUTES[reading]} min | {MINUTES[running]} min |")


# Files for people and for programs that read them


def test_the_citation_has_what_the_format_requires_and_the_version_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # Citation File Format 1.2.0
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] == "software"
    assert all(author.get("name") for author in citation["authors"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert str(citation["version"]) == project["version"]
    assert citation["license"] == project["license"]


def test_the_changelog_has_the_version_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    headings = re.findall(r"^## \[(.*)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert project["version"] in headings[0]
    kinds = re.findall(r"^### (.*)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Known limits"}


def test_only_pytorch_s_index_is_named_as_a_place_to_download_packages_from() -> None:
    for page in PAGES:
        urls = re.findall(r"INDEX_URL=(\S+)", page.read_text())
        assert set(urls) <= {"https://download.pytorch.org/whl/cpu"}, name_of(page)


def test_messages_that_troubleshooting_quotes_are_those_of_the_code() -> None:
    troubles = (ROOT / "README.md").read_text().partition("## When something is wrong")[2]
    messages = re.findall(r"^\| `([^`]*…[^`]*)`", troubles, flags=re.MULTILINE)
    assert len(messages) > 4
    code = " ".join(path.read_text() for path in (ROOT / "workshop_utils").rglob("*.py"))
    code = re.sub(r"\"\n\s*f?\"", "", code)  # a text that goes on in the next line
    for message in messages:
        for part in message.split("…"):
            assert part.strip(" .") in code, message
