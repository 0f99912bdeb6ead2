"""Runs the notebooks that a class has handed in, and grades each exercise.

    for rows in grade_class(Path("handed_in"), Path("build/grades")):
        print(rows)

`handed_in` has a folder for each learner, with their notebooks, named as the lessons are. Grading runs the original
lesson with the learner's answers: their exercise cells, which it finds by their ids, and the cells they added. So a
paragraph deleted by accident breaks nothing, and a changed check does not count: after each answer the lesson's own
check runs once more, and its verdict is the grade.

Each notebook runs in its own processes and folder, with copies of jobs and images, its own home and none of the
instructor's credentials in its environment, at the small size, with a time limit; whatever it started ends with it.

Handed-in notebooks are programs, so they run in a sandbox (`bwrap`, of the package bubblewrap): this machine read-only,
without its network, processes, home and temporary files, and without the original lessons and what others have handed
in. There are two sandboxes, one in the other. The outer one is made with your rights, shows the files, and gives root's
rights up. In the inner one the notebook is root of namespaces of its own, where it can make slow links, but not undo
what the outer one has mounted. As with a container, the kernel is shared. Without the sandbox nothing protects you from
malice.
"""

from __future__ import annotations

import ast
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd

from workshop_utils.cache import cache_folder
from workshop_utils.jobs import JobError
from workshop_utils.launchers.local.run import Event, Process, ProcessGroup
from workshop_utils.lessons import editions
from workshop_utils.lessons.selection import notebook_paths, read_notebook

EXERCISE, GRADED = "exercise", "graded"
SECONDS = 600.0  # for one notebook
INHERITED = ("PATH", "LANG", "LC_ALL", "VIRTUAL_ENV", "OMP_NUM_THREADS", "JUPYTER_PREFER_ENV_PATH")
COLUMNS = ["learner", "lesson", "exercise", "state", "verdict", "seconds"]
STATES = ("right", "wrong", "not yet", "answered")  # of a check that ran
NOBODY = 65534  # the user and group that a notebook has when root grades
APART = ("ipc", "pid", "net", "uts", "cgroup-try")  # the outer sandbox's namespaces
MOUNTED = (
    *("--die-with-parent", "--ro-bind", "/", "/", "--dev", "/dev", "--perms", "1777", "--tmpfs", "/dev/shm"),
    *("--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--tmpfs", "/run"),
    *("--perms", "1777", "--tmpfs", tempfile.gettempdir()),
)
AS_NOBODY = (
    *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
    *("--bounding-set=-all", "--inh-caps=-all"),
)
# All capabilities are those over the inner sandbox's namespaces: lessons make networks in them.
INNER = (
    *("bwrap", "--unshare-user", "--unshare-net", "--uid", "0", "--gid", "0", "--cap-add", "ALL"),
    *("--dev-bind", "/", "/"),
)


def submissions(folder: Path) -> dict[Path, Path]:
    """The notebooks LEARNER/NOTEBOOK.ipynb in `folder`, each with the lesson that it answers.

    Raises:
        JobError: if there are none, or one is not named as a lesson is.
    """
    if not folder.is_dir():
        raise JobError(f"{folder} is no folder; it must hold a folder for each learner, with their notebooks")
    lessons = {path.name: path for path in notebook_paths()}
    example, handed_in = next(iter(lessons)), sorted(folder.glob("*/*.ipynb"))
    if not handed_in:
        raise JobError(f"{folder} holds no LEARNER/NOTEBOOK.ipynb, such as ada/{example}")
    for path in handed_in:
        if path.name not in lessons:
            raise JobError(f"{path} answers no lesson; it must be named as a lesson is, such as {example}")
    return {path: lessons[path.name] for path in handed_in}


def sandbox(root: Path, hidden: Iterable[Path]) -> tuple[str, ...]:
    """The words before a command with which it can write to `root` alone, and sees nothing of the folders `hidden`.

    What the command needs is shown again where they hide it: Python, its packages, and the environments of
    `setup.environments`, which could not be made without a network.

    Raises:
        JobError: if `bwrap` is missing, or may not make a sandbox here.
    """
    is_root = os.geteuid() == 0
    words = ["bwrap", *(f"--unshare-{name}" for name in APART), *MOUNTED]
    if is_root:  # whose mounts need no user namespace; setpriv needs these to give everything up
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
            words += ["--cap-add", capability]
    else:
        words.append("--unshare-user")
    package = Path(__file__).parents[1]
    beside = [package.parent / name for name in editions.BESIDE]
    needed = (Path(sys.prefix), Path(sys.base_prefix), package, *beside, cache_folder() / "environments")
    around = {parent for path in needed for parent in path.parents if parent.is_dir()}
    closed = [path for path in around if is_root and not path.stat().st_mode & stat.S_IXOTH]
    for folder in sorted({*(path.resolve() for path in hidden), *closed}):
        words += ["--tmpfs", str(folder)]
    for kind, path in (*(("--ro-bind", each) for each in needed if each.is_dir()), ("--bind", root)):
        for parent in reversed(path.parents):  # bwrap would make them for their owner alone
            words += ["--dir", str(parent)]
        words += [kind, str(path), str(path)]
    words += [*(AS_NOBODY if is_root else ()), *INNER]
    program = (*words, sys.executable, "-c", f"import {__package__}")
    try:
        tried = subprocess.run(program, capture_output=True, text=True)
    except FileNotFoundError:
        why = "bwrap, which only Linux has, is not installed: apt-get install bubblewrap"
    else:
        if tried.returncode == 0:
            return tuple(words)
        why = tried.stderr.strip() or f"Python ends in it with {tried.returncode}"
    raise JobError(
        f"there is no sandbox to grade in ({why}); `--no-sandbox` runs what was handed in with your rights"
    )


def grade_class(
    folder: Path, output: Path, seconds: float = SECONDS, is_sandboxed: bool = True
) -> Iterator[list[dict[str, Any]]]:
    """Run each notebook of `folder` and yield its rows: learner, lesson, exercise, state, verdict, seconds.

    `state` is right, wrong, not yet, answered (an open question, for a person to judge), failed (the answer or its
    check raised), not reached (the time was over, or the kernel had died) or unreadable. The executed notebooks are
    kept below `output`, by learner.

    Raises:
        JobError: as `submissions`, and as `sandbox` unless `is_sandboxed` is false.
    """
    output.mkdir(parents=True, exist_ok=True)
    # The originals with their solutions are below the current folder.
    hidden = [Path.home(), Path.cwd(), folder, output] if is_sandboxed else None
    for path, lesson in submissions(folder).items():
        kept = output / path.parent.name / path.name
        kept.parent.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        try:
            handed_in = nbformat.read(str(path), as_version=4)
            nbformat.validate(handed_in)
        except Exception as error:  # the file may contain anything
            results = [("all", "unreadable", f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")]
        else:
            execute_apart(assembled(read_notebook(lesson), handed_in), kept, seconds, hidden)
            checks = [cell for cell in read_notebook(kept).cells if GRADED in cell.metadata.get("tags", [])]
            results = [(cell.metadata["exercise"], *_verdict(cell)) for cell in checks]
        rows = [(path.parent.name, lesson.stem, *result, time.monotonic() - start) for result in results]
        yield [dict(zip(COLUMNS, row, strict=True)) for row in rows]


def summary(rows: list[dict[str, Any]]) -> str:
    """One notebook's rows in a few words; what only a person can judge counts neither as right nor as not right."""
    states = [row["state"] for row in rows]
    right, answered = states.count("right"), states.count("answered")
    judged = f"{right} of {len(states) - answered} right"
    return f"{judged}, {answered} answered for you to judge" if answered else judged


def grades_table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """One line per learner and lesson: the number of exercises, and of those in each state."""
    frame = pd.DataFrame(rows)
    counts = pd.crosstab([frame["learner"], frame["lesson"]], frame["state"])
    counts.insert(0, "exercises", counts.sum(axis="columns"))
    return counts.rename_axis(columns=None).reset_index()


def write_grades(rows: list[dict[str, Any]], output: Path) -> Path:
    """Write each check's verdict to `output/grades.csv`."""
    path = output / "grades.csv"
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


def assembled(source: Any, handed_in: Any) -> Any:
    """The learner's edition of a lesson with the learner's answers, each followed by the lesson's own check.

    A cell that the learner added follows the same cell of the lesson as in the learner's notebook.
    """
    notebook = editions.learner(source)
    lesson_ids = {cell.id for cell in notebook.cells}
    answers = {cell.id: cell.source for cell in handed_in.cells if cell.cell_type == "code"}
    added: dict[str, list[Any]] = {}
    before = ""
    for cell in handed_in.cells:
        if cell.id in lesson_ids:
            before = cell.id
        elif cell.cell_type == "code":
            added.setdefault(before, []).append(_may_fail(cell.source, cell.id))
    cells = added.pop("", [])
    for cell in notebook.cells:
        if EXERCISE in cell.metadata.get("tags", []):
            check = ast.unparse(ast.parse(cell.source).body[-1])
            cells.append(_may_fail(answers.get(cell.id, cell.source), cell.id))
            cells.append(_may_fail(check, f"graded-{cell.id}"[:64], GRADED))
            cells[-1].metadata["exercise"] = check.partition("(")[0]
        else:
            if cell.cell_type == "code":  # it may use a wrong answer, which must not cost the next exercises
                cell.metadata["tags"] = [*cell.metadata.get("tags", []), "raises-exception"]
            cells.append(cell)
        cells += added.get(cell.id, [])
    notebook.cells = cells
    return notebook


def execute_apart(notebook: Any, kept: Path, seconds: float, hidden: Iterable[Path] | None) -> None:
    """Execute `notebook` into `kept`, apart from everything else, for `seconds` at most.

    It runs in a sandbox that hides the folders `hidden`; if that is None, without one.
    """
    with tempfile.TemporaryDirectory(prefix="workshop-grade-") as name:
        root = Path(name) / "learner"
        for beside in editions.BESIDE:
            shutil.copytree(beside, root / beside)
        for made in ("notebooks", "home", "tmp"):
            (root / made).mkdir()
        entry, executed = root / "notebooks" / kept.name, root / f"executed-{kept.name}"
        nbformat.write(notebook, str(entry))
        environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
        environment |= {"HOME": str(root / "home"), "TMPDIR": str(root / "tmp"), "WORKSHOP_SIZE": "small"}
        papermill = (sys.executable, "-m", "papermill", "--no-progress-bar", "-k", "python3")
        command: tuple[str, ...] = (*papermill, str(entry), str(executed))
        if hidden is not None:
            command = (*sandbox(root, hidden), *command)
            cache = root / "home" / ".cache"
            environment["WORKSHOP_CACHE"] = str(cache)
            cache.mkdir()
            (cache / "environments").symlink_to(cache_folder() / "environments")
            if os.geteuid() == 0:
                for path in (root, *root.rglob("*")):
                    os.lchown(path, NOBODY, NOBODY)
        process = Process(kept.stem, command, environment, str(root / "notebooks"))
        ended = threading.Event()

        def on_event(event: Event) -> None:
            if event["event"] == "ended":
                ended.set()

        group = ProcessGroup([process], on_event, seconds, Path(name) / "processes", files={})
        try:
            ended.wait()
        finally:
            group.stop()
            ended.wait()
        if (
            executed.is_file() and not executed.is_symlink()
        ):  # the learner could make a link to any file of yours
            shutil.copyfile(executed, kept)
        else:  # not even the first cell was reached
            nbformat.write(notebook, str(kept))


def _may_fail(source: str, identity: str, *tags: str) -> Any:
    """A code cell that may raise without stopping its notebook."""
    return nbformat.v4.new_code_cell(source, id=identity, metadata={"tags": [*tags, "raises-exception"]})


def _verdict(cell: Any) -> tuple[str, str]:
    """State and text of an executed check."""
    for output in cell.outputs:
        if output.output_type == "error":
            return "failed", f"{output.ename}: {output.evalue}"
        state, _, text = output.get("data", {}).get("text/plain", "").partition(": ")
        if state.lower() in STATES:
            return state.lower(), text
    return "not reached", "the time was over, or the kernel had ended"
