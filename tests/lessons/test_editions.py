"""What an instructor gets beside a learner. That nobody's work is lost is watched by guards/test_learners_files.py."""

import nbformat

from workshop_utils.lessons import editions


def test_an_instructor_reads_how_long_each_section_ran_and_sees_solutions_unfolded():
    new, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    solution = code("answer = 4", metadata={"tags": ["solution"], "jupyter": {"source_hidden": True}})
    cells = [new("# 07 · Wheels"), code("1"), new("text\n## Now you"), code("2"), new("### More"), solution]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["workshop"] = {"fingerprint": "x", "seconds": [2.0, 0.5, 0.6]}
    made = editions.instructor(notebook, "Ask why wheels are round.\n")
    assert made.cells[1].source.startswith("## For the instructor\n\nAsk why wheels are round.\n\n| section")
    assert "| start | 2 |\n| Now you | 1 |\n| **all** | **3** |" in made.cells[1].source
    assert "jupyter" not in made.cells[-1].metadata
    assert "jupyter" in solution.metadata
