"""Measure what the workshop claims, beside the tools that it starts or replaces: `make bench`, or NAMES="warm steps".

Ours and theirs are measured in turn, several times, and the median of their ratio is compared with a bar. Times depend
on the machine and on what else it does; ratios much less. The exit code is 0 where every bar was met.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Iterator

import communication
import favourite
import gauntlet
import launching
import running
import scale_model
from comparison import BenchmarkError, Row

from workshop_utils.jobs import JobError
from workshop_utils.runs import RunFailed
from workshop_utils.setup.machine import cores

# Of each: what yields the rows, given whether to measure once only.
BENCHMARKS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "launch": launching.cold,
    "warm": launching.warm,
    "ranks": launching.ranks,
    "network": running.network,
    "all_reduce": communication.all_reduce,
    "all_to_all": communication.all_to_all,
    "steps": communication.steps,
    "pipelines": communication.pipelines,
    "attention": communication.attention,
    "experts": favourite.experts,
    "gauntlet": gauntlet.caught,
    "sharded_memory": communication.sharded_memory,
    "emulation": scale_model.emulation,
    "published": scale_model.published,
}


def main() -> int:
    """Print a row for each measurement, as it is made; 1 where a bar was missed, or could not be measured."""
    parser = argparse.ArgumentParser(prog="tests/benchmarks", description=__doc__)
    names = [*BENCHMARKS, []]  # argparse compares no names, too
    parser.add_argument("names", nargs="*", choices=names, metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument("--quick", action="store_true", help="a few rows, measured once: do they still run?")
    options = parser.parse_args()
    count, load = cores(), os.getloadavg()[0]
    busy = ": busy with other work, so look at ratios, not at times" if load > count / 2 else ""
    print(f"{platform.machine()}, {count} cores, Python {platform.python_version()}, load {load:.1f}{busy}")
    print(f"{'':<62} {'ours':>9} {'theirs':>9} {'':<3} {'ratio':>7} (quartiles), bar", flush=True)
    missed = 0
    for name in options.names or BENCHMARKS:
        try:
            for row in BENCHMARKS[name](options.quick):
                print(row, flush=True)
                missed += not row.is_met
        except (BenchmarkError, JobError, RunFailed) as error:
            print(f"{name} was not measured: {error}", flush=True)
            missed += 1
    print(f"Bars missed: {missed}." if missed else "Every bar was met.")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
