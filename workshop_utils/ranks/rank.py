"""One rank of `on_ranks`: a program that a warm server forks, or that starts cold.

It reads `request` in the run's own folder, calls the program there, and writes what came of it to `outcome-RANK`: `V`
and a pickle, or `E` and JSON. It imports little, since each rank imports it again.
"""

import builtins
import collections
import io
import json
import linecache
import os
import pickle
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

MOST_EVENTS = 10_000  # of the trace, the last ones

Outcome = dict[str, Any]


def main() -> int:
    folder = Path(os.environ["TMPDIR"])
    request = pickle.loads((folder / "request").read_bytes())
    sys.path[:] = request["path"]
    os.chdir(request["folder"])
    for name, text in request["sources"].items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)

    # Imported only now, from where the notebook imports it, and not from what travels with a job.
    from workshop_utils import place
    from workshop_utils.comm.process_group import process_group

    here = place.here()
    outcome = folder / f"outcome-{here.rank}"
    try:
        with process_group(request["framework"]) as group:
            try:
                value = _called(request, group, here)
            except BaseException as error:
                _report(outcome, error)  # before the others learn of it, and fail as well
                raise
    except BaseException as error:
        _report(outcome, error)
        return 1
    with outcome.open("r+b") as file:
        file.write(b"V" + value)
    return 0


def _called(request: Outcome, group: Any, here: Any) -> bytes:
    """What the program did on this rank, pickled."""
    import cloudpickle

    from workshop_utils.training.tcp_bytes import count_bytes

    communicator = group if request["framework"] is None else None
    if communicator is not None:
        communicator.trace = collections.deque(maxlen=MOST_EVENTS)
        _answer_whom_it_waits_for(communicator)
    builtins.input = _no_input
    program, arguments = pickle.loads(request["program"])
    with count_bytes() as counted:
        started = time.perf_counter()
        try:
            if request["cell"] is None:
                value = program(group, **arguments)
            else:
                names = {request["group"]: group, "rank": here.rank, "size": here.world_size}
                value = _run_cell(request["cell"], {"__name__": "__main__", **arguments, **names})
        except SystemExit as leaving:
            if leaving.code:
                raise
            value = None
        seconds = time.perf_counter() - started
    if communicator is None:
        sent, messages, trace = counted.sent, None, []
    else:
        traffic = communicator.traffic
        sent, messages, trace = (
            int(traffic.bytes_sent.sum()),
            int(traffic.messages_sent.sum()),
            [*communicator.trace],
        )
    try:
        return cloudpickle.dumps((value, messages, sent, seconds, trace))
    except Exception as error:
        kind = type(value).__qualname__
        raise TypeError(f"it returned a {kind}, which cannot be sent back: {error}") from None


def _run_cell(cell: tuple[str, str], namespace: dict[str, Any]) -> Any:
    """Execute a cell, (source, file name); the value of its last expression."""
    import ast

    source, name = cell
    *body, last = ast.parse(source, name).body or [ast.Pass()]
    if not isinstance(last, ast.Expr):
        body.append(last)
    exec(compile(ast.Module(body, []), name, "exec"), namespace)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    return None


def _answer_whom_it_waits_for(communicator: Any) -> None:
    """At SIGUSR1, which asks for this rank's stack, also say for whom it waits."""
    import faulthandler

    def answer(*_: object) -> None:
        if (peer := communicator.waits_for) is not None:
            where = communicator._collective or "send or recv"
            print(f"rank {communicator.rank} waits for rank {peer}, in {where}", flush=True)

    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, answer)
    faulthandler.register(signal.SIGUSR1, all_threads=False, chain=True)


def _no_input(prompt: object = "") -> str:
    raise EOFError(
        f"input({str(prompt)!r}) has nobody to ask on a rank; ask before, and pass the answer along"
    )


def _report(outcome: Path, error: BaseException) -> None:
    """Write the first error of this rank, with its traceback from the program on."""
    with outcome.open("r+b", buffering=0) as file:
        if file.read(1):
            return
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        text = io.StringIO()
        traceback.print_exception(type(error), error, trace, file=text)
        summary = traceback.format_exception_only(error)[-1].strip()
        if "re-initialize CUDA in forked subprocess" in summary:
            summary += ". CUDA was in use before the ranks were forked; restart the kernel"
        record = {"time": time.monotonic(), "summary": summary, "traceback": text.getvalue()}
        file.seek(0)
        file.write(b"E" + json.dumps(record).encode())


if __name__ == "__main__":
    sys.exit(main())
