"""The cell magic %%ranks: what stands in the cell, on every rank.

    %%ranks 4 --network 100Mbit
    array = np.full(1000, float(rank))
    ring_all_reduce(communicator, array)
    array[0]

A rank sees `rank`, `size` and `communicator` (`dist` with `--framework torch`, `hvd` with horovod, `strategy` with
tensorflow), and copies of the notebook's variables that the cell names. Lines appear as ranks print them; at the end
comes the value of each rank's last expression.
"""

from __future__ import annotations

import argparse
import shlex
from typing import Any, NoReturn

from workshop_utils.jobs import JobError
from workshop_utils.jobs.function import names_used
from workshop_utils.ranks import GROUPS, launch, packing
from workshop_utils.ranks.results import Results


class _Options(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise JobError(
            f"%%ranks: {message}; it is written such as %%ranks 4 --network 100Mbit --framework torch"
        )


def _options(line: str) -> argparse.Namespace:
    parser = _Options(prog="%%ranks", add_help=False, allow_abbrev=False)
    parser.add_argument("ranks", type=int)
    parser.add_argument("--network")
    parser.add_argument("--framework", choices=[name for name in GROUPS if name])
    parser.add_argument("--timeout", default="60s")
    return parser.parse_args(shlex.split(line))


def register(shell: Any) -> None:
    """Add %%ranks to a notebook."""

    def ranks(line: str, cell: str) -> Results:
        options = _options(line)
        # Its first line is the magic's own: line numbers are to be those that the notebook shows.
        source = "\n" + shell.transform_cell(cell)
        name = shell.compile.cache(source, shell.execution_count)
        compile(source, name, "exec")  # a mistake is shown here, once, and not by every rank
        used = names_used(source)
        if "get_ipython" in used:
            raise JobError("%%ranks: a rank has no notebook, so its cell cannot hold % or ! commands")
        variables = {each: shell.user_ns[each] for each in used & shell.user_ns.keys()}
        packed = packing.packed(None, variables, (source, name))
        return launch(
            options.ranks,
            packed,
            options.network,
            options.framework,
            options.timeout,
            on_line=lambda rank, text: print(f"[{rank}] {text}"),
        )

    shell.register_magic_function(ranks, "cell", "ranks")
