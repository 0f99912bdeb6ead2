"""Train in short turns, and let another process train between them; write down how long each turn took.

Two processes that hand a token to and fro, on the same core, see the same machine: whatever else runs there slows
the turns of both. The token is a byte in a named pipe, one pipe for each process to wait at.

Of each turn two times are written down: by the clock, and less the time for which this process was ready to run
and something else ran on its core.
"""

import argparse
import json
import os
import select
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from workshop_utils import place

TURNS_A_REPORT = 10
PATIENCE_SECONDS = 60.0  # after which the other process must be dead


def wait_at(pipe: int) -> None:
    """Return with the token."""
    if not select.select([pipe], [], [], PATIENCE_SECONDS)[0]:
        raise TimeoutError(f"the other process did not hand over within {PATIENCE_SECONDS:.0f} s")
    os.read(pipe, 1)


def seconds_waited() -> float:
    """Seconds for which this thread has waited for a core so far; 0 where the kernel does not count them.

    Source: Linux, Documentation/scheduler/sched-stats.rst, "/proc/<pid>/schedstat".
    """
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def main() -> None:
    """Take the turns that the command line asks for."""
    place.here()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--own-pipe", required=True)
    parser.add_argument("--other-pipe", required=True)
    parser.add_argument("--times", type=Path, required=True, help="where to write seconds, a pair a turn")
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="of one turn")
    parser.add_argument("--batch", type=int, required=True, help="samples of one step")
    parser.add_argument("--core", type=int, required=True)
    options = parser.parse_args()
    # Opened to read and to write, a pipe does not wait for somebody at its other end.
    own, other = (os.open(pipe, os.O_RDWR) for pipe in (options.own_pipe, options.other_pipe))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {options.core})

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    images, labels = torch.rand(options.batch, 784), torch.randint(10, (options.batch,))

    times = []
    for turn in range(options.turns):
        wait_at(own)
        waited, started = seconds_waited(), time.perf_counter()
        for _ in range(options.steps):
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if turn % TURNS_A_REPORT == 0:
            place.report(step=turn * options.steps, loss=loss.item())
        seconds = time.perf_counter() - started
        times.append((seconds, seconds - (seconds_waited() - waited)))
        os.write(other, b".")
    options.times.write_text(json.dumps(times))


if __name__ == "__main__":
    main()
