"""What the documentation says exists: commands, options, targets, files, links; and who wrote it can be cited."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
import typer
import yaml

from workshop_utils import cli, jobs
from workshop_utils.launchers.kubernetes import Kubernetes
from workshop_utils.launchers.kubernetes.operators import pods_of
from workshop_utils.launchers.targets import TARGETS as LAUNCH_TARGETS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
LAUNCHING = (ROOT / "docs" / "launching.md").read_text()
SET_UP = (ROOT / "docs" / "setup.md").read_text()
FOLDERS = [path for path in (ROOT / "jobs").rglob("*.md") if "build" not in path.parts]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *FOLDERS])
LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TEACHING = sorted((ROOT / "notebooks").glob("teaching/*.md"))


def name_of(path):
    return str(path.relative_to(ROOT))


def shell_blocks(page):
    return re.findall(r"^```sh\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def present(page):
    """The text of a page without the first cells of the changelog's tables: names from before."""
    text = page.read_text()
    return re.sub(r"^\|[^|]*\|", "", text, flags=re.MULTILINE) if page.name == "CHANGELOG.md" else text


def commands_in(page):
    """The words of each command of a page, in blocks and inline."""
    lines = [line for block in shell_blocks(page) for line in block.replace("\\\n", " ").splitlines()]
    inline = r"`((?:make|\.venv/bin/workshop|workshop|python -m) [^`]+)`"
    lines += re.findall(inline, present(page).replace("\n", " "))
    return [shlex.split(part, comments=True) for line in lines for part in line.split("&&")]


def options_by_command():
    """All commands of `workshop`, such as `scaling measure`, with their options."""
    found = {}
    todo = [("", typer.main.get_command(cli.app))]
    while todo:
        name, command = todo.pop()
        inner = getattr(command, "commands", {})
        options = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
        found[name] = set() if inner else options
        todo += [(f"{name} {key}".strip(), value) for key, value in inner.items()]
    return found


COMMANDS = options_by_command()
TARGETS = re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


def links(page):
    """The relative links in the text of a page, each with its target's path."""
    if page.suffix == ".ipynb":
        notebook = nbformat.read(str(page), as_version=4)
        text = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    else:
        text = page.read_text()
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)  # code has no links
    for link in re.findall(r"\]\(<?([^)#?\s>]+)[^)]*\)", text):
        if not urlsplit(link).scheme:
            yield link, Path(page.parent, unquote(link))


@pytest.mark.parametrize("page", [*PAGES, *TEACHING, *LESSONS], ids=name_of)
def test_relative_links_lead_somewhere(page):
    for link, path in links(page):
        assert path.exists(), link


@pytest.mark.processes
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_targets_modules_commands_and_options_that_are_named_exist(page):
    folders = r"`((?:jobs|docs|images|notebooks|tests|workshop_utils|\.devcontainer)/[\w./*-]*)`"
    for path in re.findall(folders, present(page)):
        assert re.search(r"(NN_|NAME|LESSON|SUBJECT)", path) or list(ROOT.glob(path.rstrip("/"))), path
    for block in shell_blocks(page):
        answer = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True)
        assert answer.returncode == 0, answer.stderr
    for words in commands_in(page):
        words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
        if words[:1] == ["make"]:
            assert set(words[1:2]) <= set(TARGETS), words
        elif words[:2] == ["python", "-m"] and words[2].startswith("workshop_utils"):
            module = ROOT / words[2].replace(".", "/")
            assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file(), words
        elif len(words) > 1 and Path(words[0]).name == "workshop":
            called = next(
                (" ".join(words[1:end]) for end in (3, 2) if " ".join(words[1:end]) in COMMANDS), ""
            )
            assert called, words
            own = words[: words.index("--")] if "--" in words else words  # the rest is the script's
            options = {word.partition("=")[0] for word in own if word.startswith("--")}
            assert options <= COMMANDS[called] | {"--help"}, words


def test_the_tables_of_launching_have_all_places_and_all_strategies():
    places = LAUNCHING[LAUNCHING.index("| where |") : LAUNCHING.index("## GPUs")]
    assert set(re.findall(r"--on ([\w-]+)", places)) | {"local"} == set(LAUNCH_TARGETS)
    assert set(re.findall(r"`(--[\w-]+)", places)) <= COMMANDS["launch"]
    strategies = LAUNCHING[LAUNCHING.index("| strategy |") : LAUNCHING.index("## Where a step")]
    shown = {}
    for row in strategies.splitlines()[2:]:
        cells = [re.findall(r"`([\w/.]+)`", cell) for cell in row.split("|")]
        if len(cells) > 3:
            shown |= dict(zip(cells[1], cells[3], strict=True))
    assert set(shown) == set(jobs.StrategyName.__args__)
    for strategy, folder in shown.items():
        assert jobs.TrainingJob.load(ROOT / folder).strategy == strategy


def test_the_lines_of_kubectl_in_lesson_12_name_the_objects_of_its_job():
    notebook = nbformat.read(str(ROOT / "notebooks/12_eks_and_kubeflow.ipynb"), as_version=4)
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    lines = {
        shlex.split(line)[1]: line
        for line in re.findall(r"`(kubectl [^`]+ (?:-f|-l|pytorchjobs) [^`]+)`", text)
    }
    manifest = Kubernetes().render(jobs.TrainingJob.load(ROOT / "jobs/mnist_torch_ddp"))
    assert lines.keys() >= {"create", "get", "describe", "logs", "wait", "delete"}
    assert lines["logs"].split()[-1] == pods_of(manifest)[0].name
    for line in (lines[verb] for verb in ("get", "describe", "wait")):
        assert manifest.resource["metadata"]["name"] in line
    assert all("jobs/mnist_torch_ddp/kubernetes.yaml" in lines[verb] for verb in ("create", "delete"))


def test_links_into_the_documents_lead_to_a_heading_of_theirs():
    linked = {}
    for page in (*PAGES, *LESSONS):
        for name, anchor in re.findall(r"([\w.]+\.md)#([\w-]+)\)", page.read_text()):
            linked.setdefault(name, set()).add(anchor)
    assert linked
    for name, anchors in linked.items():
        (page,) = [page for page in PAGES if page.name == name and page.parent in (ROOT, ROOT / "docs")]
        headings = re.findall(r"^#+ (.*)", page.read_text(), flags=re.MULTILINE)
        assert anchors <= {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings}, name


@pytest.mark.processes
def test_the_readme_fits_on_a_few_screens_and_its_commands_run(tmp_path):
    assert len(README.splitlines()) <= 150
    commands = [
        words for words in commands_in(ROOT / "README.md") if words and words[0].endswith("/workshop")
    ]
    assert len(commands) >= 7
    (tmp_path / "jobs").symlink_to(ROOT / "jobs")
    # Workers of the scale model: five numbers of them take four minutes.
    few = {"1,2,4,8,16": "1,2", "epochs=5": "epochs=1"}
    for words in commands:
        words = [few.get(word, word) for word in words]
        program = [sys.executable, "-c", "from workshop_utils.cli import main; main()"]
        done = subprocess.run(
            [*program, *words[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, (words, done.stderr)


def test_the_readme_has_a_row_for_each_lesson():
    rows = re.findall(r"^\| \[\d\d\]\(notebooks/(\S+)\)", README, flags=re.MULTILINE)
    assert rows == [path.name for path in LESSONS]


def test_messages_that_troubleshooting_quotes_are_those_of_the_code():
    troubles = SET_UP.partition("## When something is wrong")[2]
    messages = re.findall(r"^\| `([^`]*…[^`]*)`", troubles, flags=re.MULTILINE)
    assert len(messages) > 4
    code = " ".join(path.read_text() for path in (ROOT / "workshop_utils").rglob("*.py"))
    code = re.sub(r"\"\n\s*f?\"", "", code)  # a text that goes on in the next line
    for message in messages:
        for part in message.split("…"):
            assert part.strip(" .") in code, message


def test_citation_and_changelog_have_the_version_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # Citation File Format 1.2.0
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert (
        project["version"] in re.findall(r"^## \[(.*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    )
