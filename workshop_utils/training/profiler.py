"""A trace of this rank's steps, made by PyTorch's profiler; `workshop trace` merges those of all ranks."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from workshop_utils import place

# Steps before `profile` records: in the first ones DDP rebuilds its buckets and memory is allocated.
WARM_UP_STEPS = 3


@contextlib.contextmanager
def profile(steps: int = 0) -> Iterator[Any]:
    """Record `steps` steps of this rank with PyTorch's profiler. Yields an object whose `step()` ends a step.

        with profile(steps=options.profile_steps) as profiler:
            for images, labels in batches:
                ...
                profiler.step()

    By default, with 0 steps, nothing is recorded and PyTorch is not imported. Otherwise, after WARM_UP_STEPS steps,
    CPU activity is recorded, and CUDA's where there is a GPU. It goes to `trace-rank-0000.json.gz`, in the folder
    `traces` below the model folder (which a local run keeps only if the job has `outputs`),
    once the steps are over or the block ends, even by an error. The file appears complete or not at all.
    `workshop trace` merges the ranks' files.

    Raises:
        ValueError: if `steps` is below zero.
        OSError: if the file cannot be written.
    """
    if steps < 0:
        raise ValueError(f"steps is {steps}; it must be 0, to record nothing, or more")
    if steps == 0:
        yield SimpleNamespace(step=lambda: None)
        return
    import torch

    here = place.from_environment(os.environ)
    folder = here.model_folder / "traces"
    path = folder / f"trace-rank-{here.rank or 0:04d}.json.gz"

    def write(profiler: Any) -> None:
        if profiler.step_num > WARM_UP_STEPS:
            folder.mkdir(parents=True, exist_ok=True)
            partial = folder / f".{path.name}"  # beside it, since a rename cannot cross file systems
            profiler.export_chrome_trace(str(partial))
            partial.replace(path)
            print(f"trace of rank {here.rank or 0}: {path}")

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    else:  # PyTorch 2.13 logs its own calls; with a GPU, what CUPTI logs is worth reading
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    profiler = torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(wait=WARM_UP_STEPS - 1, warmup=1, active=steps, repeat=1),
        on_trace_ready=write,
        record_shapes=True,  # they give the bytes of a collective
    )
    profiler.preset_metadata_json("workshop", json.dumps({"rank": here.rank, "world_size": here.world_size}))
    with profiler:
        try:
            yield profiler
        finally:
            complete = profiler.step_num - WARM_UP_STEPS
            if 0 < complete < steps:  # the trace ends with a step that is not complete
                profiler.add_metadata_json("complete_steps", str(complete))
    if complete <= 0:
        print(
            f"no trace: the first {WARM_UP_STEPS} steps are warm-up, and no others followed", file=sys.stderr
        )
