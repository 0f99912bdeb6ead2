"""The cell magic %%ranks: what stands in the cell, on every rank.

    %%ranks 4 --network 100Mbit
    array = np.full(1000, float(rank))
    ring_all_reduce(communicator, array)
    array[0]

A rank sees `rank`, `size` and `communicator` (`dist` with `--framework torch`, `hvd` with horovod, `strategy` with
tensorflow), and copies of the notebook's variables that the cell names. Lines appear as ranks print them; at the end
comes the value of each rank's last expression, unless a semicolon ends it.
"""

from __future__ import annotations

import dis
import io
import tokenize
import traceback
from types import CodeType
from typing import Any

from workshop_utils.jobs import JobError
from workshop_utils.jobs.function import GROUPS, TWINS, names_used
from workshop_utils.ranks import launch, packing
from workshop_utils.ranks.results import Results


def _assigned_first(code: CodeType) -> set[str]:
    """The names that a cell assigns before it reads them, in the order in which it is written."""
    first: dict[str, str] = {}
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_NAME", "STORE_NAME"):
            first.setdefault(each.argval, each.opname)
    return {name for name, operation in first.items() if operation == "STORE_NAME"}


def _ends_in_semicolon(source: str) -> bool:
    """Whether a cell is to show no value; the IPython of a foreign kernel may not look at a cell magic's own."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [each.string for each in tokens if each.string.strip() and each.type != tokenize.COMMENT][-1:] == [
        ";"
    ]


def register(shell: Any) -> None:
    """Add %%ranks to a notebook."""
    from IPython.core.error import UsageError
    from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

    @magic_arguments()
    @argument("ranks", type=int, help="how many processes")
    @argument("--network", help="of the links between them, such as 100Mbit or 100Mbit,latency=1ms")
    @argument(
        "--framework", choices=[name for name in GROUPS if name], help="whose process group the cell uses"
    )
    @argument("--emulated-device", help="what each rank computes on, such as 400ms")
    @argument("--timeout", default="60s", help="after which they are ended")
    def ranks(line: str, cell: str) -> Results | None:
        """Execute the cell on several processes, and show what each has printed and returned."""
        try:
            options = parse_argstring(ranks, line)
        except ValueError as error:  # a quotation mark that is not closed
            raise UsageError(str(error)) from None
        # Below the magic's own line, and empty ones: line numbers are to be those that the notebook shows.
        above = cell[: len(cell) - len(cell.lstrip())].count("\n") + 1
        source = "\n" * above + shell.transform_cell(cell)
        name = shell.compile.cache(source, len(shell.history_manager.input_hist_parsed) - 1)
        try:
            code = compile(source, name, "exec")
        except SyntaxError as error:  # shown once, and not by every rank
            text = "".join(traceback.format_exception_only(error)).strip()
            raise JobError(f"%%ranks: {packing.with_cells(text)}") from None
        used, group = names_used(source), GROUPS[options.framework]
        if "get_ipython" in used:
            raise JobError("%%ranks: a rank has no notebook, so its cell cannot hold % or ! commands")
        # The first are IPython's own, and Python's on a rank; the others are the rank's.
        names, assigned = used & shell.user_ns.keys() - {*TWINS, group, "rank", "size"}, _assigned_first(code)
        # A cell seldom reads a variable that it assigns first, so such a one is no reason to refuse.
        variables = {
            each: shell.user_ns[each]
            for each in names
            if each not in assigned or packing.travels(shell.user_ns[each])
        }
        results = launch(None, variables, **vars(options), cell=(source, name, group))
        return None if _ends_in_semicolon(source) else results

    shell.register_magic_function(ranks, "cell", "ranks")
