"""An exercise takes none of the wrong answers; that it takes its own solution is seen where the notebooks run.

The wrong answers are in `wrong_answers.yaml`; check, imports and solution are those of the notebook itself, so nothing
here knows what a check is called.
"""

import ast
import builtins
import json
import symtable
from pathlib import Path

import pytest
import yaml
from adapter import ROOT

pytestmark = pytest.mark.processes

WRONG = yaml.safe_load(Path(__file__).with_name("wrong_answers.yaml").read_text(encoding="utf-8"))
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
FEWEST = 5  # wrong answers of an exercise


def cells_of(lesson):
    """The code cells of a lesson, each with its tags and its source as one text."""
    cells = json.loads(NOTEBOOKS[lesson].read_text(encoding="utf-8"))["cells"]
    return [
        {"id": cell["id"], "tags": cell["metadata"].get("tags", []), "source": "".join(cell["source"])}
        for cell in cells
        if cell["cell_type"] == "code"
    ]


def exercises():
    """Lesson and cell of every exercise."""
    for lesson in NOTEBOOKS:
        for cell in cells_of(lesson):
            if "exercise" in cell["tags"]:
                yield lesson, cell["id"]


def solution_of(cells, exercise):
    """The first solution behind an exercise, which is its own."""
    ids = [cell["id"] for cell in cells]
    return next(cell["source"] for cell in cells[ids.index(exercise) :] if "solution" in cell["tags"])


def free(source):
    """The names that `source` takes from what ran before it: not those of its functions' own variables."""

    def of(table):
        own = {
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_referenced() and (symbol.is_global() or table.get_type() == "module")
        }
        return own.union(*map(of, table.get_children()))

    table = symtable.symtable(source, "cell", "exec")
    made_here = {
        symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()
    }
    return of(table) - made_here - set(dir(builtins))


def bound(statement):
    """The names that a statement at a cell's top binds, so far as they can be had cheaply."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(name.asname or name.name).split(".")[0] for name in statement.names}
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    if not isinstance(statement, ast.Assign):
        return set()
    return {
        node.id
        for target in statement.targets
        for node in ast.walk(target)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def statements(source):
    """The statements of a cell without what only a notebook understands."""
    lines = [line for line in source.splitlines() if not line.startswith(("%", "!"))]
    return ast.parse("\n".join(lines)).body


def preamble(cells, exercise, source):
    """What the cells before an exercise must have run for `source` to run: imports, and what gives it its variables."""
    wanted = free(source)
    needed = []
    before = cells[: [cell["id"] for cell in cells].index(exercise)]
    for cell in reversed(before):
        if {"exercise", "solution"} & set(cell["tags"]):
            continue
        for statement in reversed(statements(cell["source"])):
            if bound(statement) & wanted:
                taken = statement.value if isinstance(statement, ast.Assign) else statement
                wanted = (wanted - bound(statement)) | free(ast.unparse(taken))
                needed.insert(0, statement)
    return needed


def verdict(lesson, exercise, source):
    """What the notebook shows below a cell with `source` in place of the exercise's."""
    *body, last = statements(source)
    assert isinstance(last, ast.Expr), "the cell does not end with its check"
    before = preamble(cells_of(lesson), exercise, source)
    namespace = {"__name__": "__main__"}
    exec(compile(ast.Module([*before, *body], []), f"<{exercise}>", "exec"), namespace)
    return repr(eval(compile(ast.Expression(last.value), f"<{exercise}>", "eval"), namespace))


def answered(cells, exercise, answer):
    """The exercise's cell with `answer` in it; the forms of an entry stand at the head of `wrong_answers.yaml`."""
    if isinstance(answer, dict) and "instead of" in answer:
        solution = solution_of(cells, exercise)
        assert answer["instead of"] in solution, f"{answer['instead of']!r} is not in the solution"
        return imports(cells, exercise) + solution.replace(answer["instead of"], answer["write"])
    *given, check = statements(next(cell["source"] for cell in cells if cell["id"] == exercise))
    if isinstance(answer, str):
        text = answer
    elif "returns" in answer:
        (function,) = (each for each in given if isinstance(each, ast.FunctionDef))
        text = f"def {function.name}({ast.unparse(function.args)}):\n    return {answer['returns']}"
    else:
        text = answer["answer"]
    return f"{imports(cells, exercise)}{text}\n{ast.unparse(check)}"


def imports(cells, exercise):
    source = next(cell["source"] for cell in cells if cell["id"] == exercise)
    kept = [each for each in statements(source) if isinstance(each, ast.Import | ast.ImportFrom)]
    return "".join(f"{ast.unparse(each)}\n" for each in kept)


@pytest.fixture(autouse=True)
def among_the_notebooks(monkeypatch):
    """A notebook runs where it lies; here at small size, as in `make notebooks`, since some solutions measure."""
    monkeypatch.chdir(ROOT / "notebooks")
    monkeypatch.setenv("WORKSHOP_SIZE", "small")


@pytest.mark.parametrize(
    ("lesson", "exercise", "answer"),
    [
        pytest.param(
            lesson,
            exercise,
            answer,
            id=f"{lesson}-{exercise.removeprefix('exercise-')}-{number}",
            marks=pytest.mark.horovod if exercise == "exercise-clip-and-accumulate" else (),
        )
        for lesson, answers in WRONG.items()
        for exercise, wrong in answers.items()
        for number, answer in enumerate(wrong)
    ],
)
def test_a_wrong_answer_is_not_right(lesson, exercise, answer):
    said = verdict(lesson, exercise, answered(cells_of(lesson), exercise, answer))
    assert said.startswith("Wrong"), f"{answer}\nis answered with\n{said}"
    if isinstance(answer, dict):
        assert answer.get("says", "") in said, f"{answer}\nis answered with\n{said}"


def test_every_exercise_has_wrong_answers():
    """An exercise that is new, or was called otherwise, needs some in `wrong_answers.yaml`."""
    written = {(lesson, exercise) for lesson, wrong in WRONG.items() for exercise in wrong}
    assert written == set(exercises()), (
        "each exercise of a notebook needs an entry in wrong_answers.yaml, and no other"
    )
    few = {
        name: len(answers)
        for wrong in WRONG.values()
        for name, answers in wrong.items()
        if len(answers) < FEWEST
    }
    assert not few, f"an exercise needs {FEWEST} wrong answers in wrong_answers.yaml; these have fewer: {few}"


@pytest.mark.parametrize("late", [0, 1])
def test_synchronous_workers_end_together_whichever_is_late(late):
    """Both end, also where a step outlasts the last two updates, which TensorFlow's StopAtStepHook misses."""
    arguments = {"seeds": [0], "updates": 3, "synchronous": True, "compute_seconds": [5 - 5 * late, 5 * late]}
    run = f"on_ranks(3, between_graph, {arguments} | {{'cluster': four}}, timeout=90).values[1:]"
    four = "four = {'ps': addresses[:1], 'worker': addresses[1:3]}\n"
    counts = f"{four}[(len(logs[0]), sum(bool(came_in) for *_, came_in in logs[0])) for _, _, logs in {run}]"
    # The other worker made all six gradients that came in, and one that was thrown away.
    right = "[(7, 6), (1, 0)]" if late else "[(1, 0), (7, 6)]"
    assert verdict("06_tensorflow", "exercise-slow-staleness", counts) == right
