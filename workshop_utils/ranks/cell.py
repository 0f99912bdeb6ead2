"""The cell magic %%ranks: what stands in the cell, on every rank.

    %%ranks 4 --network 100Mbit
    array = np.full(1000, float(rank))
    ring_all_reduce(communicator, array)
    array[0]

A rank sees `rank`, `size` and `communicator` (`dist` with `--framework torch`, `hvd` with horovod, `strategy` with
tensorflow), and copies of the notebook's variables that the cell names. Lines appear as ranks print them; at the end
comes the value of each rank's last expression, unless a semicolon ends it.

The ranks are new for each cell. With `--keep` they stay: the names of one such cell are there in the next. What a cell
has assigned on the ranks counts until the notebook assigns that name. `%ranks stop` ends them.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import io
import tokenize
import traceback
from dataclasses import dataclass
from types import CodeType
from typing import Any

from workshop_utils.jobs import JobError
from workshop_utils.jobs.function import GROUPS
from workshop_utils.ranks import RankGroup, packing
from workshop_utils.ranks.results import Results

# Through which a cell reads names that it does not hold.
ANY_NAME = {"globals", "locals", "vars", "eval", "exec", "__main__"}


def _assigned_first(code: CodeType) -> set[str]:
    """The names that a cell assigns before it reads them, in the order in which it is written."""
    first: dict[str, str] = {}
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_NAME", "STORE_NAME"):
            first.setdefault(each.argval, each.opname)
    return {name for name, operation in first.items() if operation == "STORE_NAME"}


def _assigned(source: str, flags: int) -> set[str]:
    """The names that a cell has assigned, also below a magic such as %%time."""
    names: set[str] = set()
    with contextlib.suppress(SyntaxError):
        code = compile(source, "", "exec", flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        stores = [
            each for each in dis.get_instructions(code) if each.opname in ("STORE_NAME", "STORE_GLOBAL")
        ]
        names.update(each.argval for each in stores)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("get_ipython().run_"):
                texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
                if texts[:1] and texts[0] in ("time", "capture", "prun"):  # which run it here
                    names |= _assigned(str(texts[-1]), flags)
    return names


def _ends_in_semicolon(source: str) -> bool:
    """Whether a cell is to show no value; the IPython of a foreign kernel may not look at a cell magic's own."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [each.string for each in tokens if each.string.strip() and each.type != tokenize.COMMENT][-1:] == [
        ";"
    ]


@dataclass
class _Kept:
    """The ranks that stay, and the number of cells that had run at their last one."""

    group: RankGroup | None = None
    number: int = 0


kept = _Kept()  # it outlives %reload_ext


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
    @argument(
        "--keep", action="store_true", help="let them stay, with their variables, for the next such cell"
    )
    def ranks(line: str, cell: str) -> Results | None:
        """Execute the cell on several processes, and show what each has printed and returned."""
        try:
            options = parse_argstring(ranks, line)
        except ValueError as error:  # a quotation mark that is not closed
            raise UsageError(str(error)) from None
        chosen = [options.ranks, options.network, options.framework, options.emulated_device]
        if options.keep and kept.group and kept.group.has_ranks:
            theirs = kept.group.options
            if any(each not in (None, other) for each, other in zip(chosen, theirs, strict=True)):
                raise JobError(
                    f"%%ranks {line}: the {theirs[0]} ranks that stay have network {theirs[1]}, framework {theirs[2]} "
                    f"and emulated device {theirs[3]}; leave other options out, or end the ranks with `%ranks stop`"
                )
            chosen = [*theirs]
        elif options.keep and kept.group:  # earlier ones have ended by themselves
            theirs = kept.group.options
            chosen = [other if each is None else each for each, other in zip(chosen, theirs, strict=True)]
        # Below the magic's own line, and empty ones: line numbers are to be those that the notebook shows.
        above = cell[: len(cell) - len(cell.lstrip())].count("\n") + 1
        source = "\n" * above + shell.transform_cell(cell)
        name = shell.compile.cache(source, len(shell.history_manager.input_hist_parsed) - 1)
        flags = shell.compile.flags  # the notebook's `from __future__ import annotations`
        try:
            code = compile(source, name, "exec", flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        except SyntaxError as error:  # shown once, and not by every rank
            text = "".join(traceback.format_exception_only(error)).strip()
            raise JobError(f"%%ranks: {packing.with_cells(text)}") from None
        used, assigned = packing.globals_of(code), _assigned_first(code)
        if "get_ipython" in used:
            raise JobError("%%ranks: a rank has no notebook, so its cell cannot hold % or ! commands")
        if used & ANY_NAME:
            others = {each for each in shell.user_ns.keys() - shell.user_ns_hidden if each[0] != "_"} - used
            used, assigned = used | others, assigned | others
        # A cell seldom reads a variable that it assigns first, so such a one is no reason to refuse.
        names = [
            each
            for each in sorted(used)
            if each not in assigned or (each in shell.user_ns and packing.travels(shell.user_ns[each]))
        ]
        group, rebound = kept.group, set[str]()
        if options.keep and group and group.has_ranks:
            cells = shell.history_manager.input_hist_parsed[kept.number :]
            rebound = rebound.union(*(_assigned(each, shell.compile.flags) for each in cells))
        else:
            group = RankGroup(*chosen)
            if options.keep and kept.group:
                print("These ranks are new; what earlier ones had is gone.")
        before = kept.group, kept.number
        if options.keep:
            kept.group, kept.number = group, shell.execution_count
        sent = (source, name, GROUPS[chosen[2]], flags)
        parts = packing.parts_used(code, [shell.user_ns.get(each) for each in names])
        try:
            results = group.launch(
                None, {"parts": parts}, options.timeout, options.keep, sent, names, rebound
            )
        except BaseException as error:
            if isinstance(error, JobError) or group.has_ranks:  # nothing was begun
                kept.group, kept.number = before
            raise
        return None if _ends_in_semicolon(source) else results

    def stop(line: str) -> None:
        """`%ranks stop` ends the ranks that stay."""
        if line.strip() != "stop":
            raise UsageError(
                "%ranks knows `%ranks stop`, which ends the ranks that stay; a cell for ranks begins with %%ranks 4"
            )
        there = kept.group if kept.group and kept.group.has_ranks else None
        count = there.options[0] if there else 0
        print(f"{count} rank{'s have' if count > 1 else ' has'} ended." if there else "No ranks stay.")
        if there:
            there.stop()
        kept.group = None

    shell.register_magic_function(ranks, "cell", "ranks")
    shell.register_magic_function(stop, "line", "ranks")
