"""Checks of lesson 00, welcome; see `workshop_utils.exercises` for how a check speaks."""

from __future__ import annotations

from workshop_utils.exercises import (
    Wrong,
    exercise,
)
from workshop_utils.runs import Run, RunState


@exercise
def three_workers(run: Run) -> str:
    """`run` is one of three workers that has ended well."""
    if not isinstance(run, Run):
        raise Wrong(f"this is {type(run).__name__}; hand over what `launch` returned.")
    if run.state is RunState.RUNNING:
        raise Wrong("it still runs: `run.wait()` returns when it has ended.")
    if run.state is not RunState.SUCCEEDED:
        raise Wrong(f"the run has {run.state}. {run.reason}".strip())
    if len(run.workers) != 3:
        raise Wrong(
            f"it has {len(run.workers)} workers, {', '.join(run.workers)}; `replace` can change that."
        )
    return f"{', '.join(run.workers)} trained one model in {run.seconds:.1f} s."
