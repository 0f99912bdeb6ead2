"""Jobs of the lessons beside theory and PyTorch: over slow links."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import bare
from comparison import AS_THEORY, Row

from workshop_utils.comm.ring import ring_seconds
from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.network import Network

SERVERS = Path(__file__).parent / "measure_parameter_server"
NETWORK = Network(bandwidth="100Mbit")
REPEATS = 4  # of which the first is left out: connections are still opening up


def records_of(job: str | Path, workers: int, place: Any, **arguments: Any) -> list[Mapping[str, Any]]:
    """What the workers of a job report, of `jobs/` or in a folder of its own."""
    described = TrainingJob.load(bare.JOBS / job).replace(workers=workers, arguments=arguments)
    with place.launch(described) as run:
        return list(run.wait().records)


def network(quick: bool) -> Iterator[Row]:
    """Of the slowest rank. Theory: what the bytes need at the rate that is left for payload."""
    place, bandwidth, nbytes = Local(network=NETWORK, warm=True), NETWORK.goodput, 4_000_000
    for workers in (2,) if quick else (2, 3, 4, 8):
        records = records_of("measure_all_reduce", workers, place, nbytes=nbytes, repeats=REPEATS)
        theory = ring_seconds(workers, nbytes, 0.0, bandwidth)
        pairs = [(seconds, theory) for seconds in slowest(records, "all_reduce_seconds")]
        yield Row(f"ring over 100 Mbit/s, {workers} workers, beside theory", pairs, "s", AS_THEORY)
        records = records_of(SERVERS, workers, place, nbytes=nbytes // 2, steps=REPEATS)
        theory = 2 * workers * (nbytes // 2) / bandwidth  # all in, and only then all out
        pairs = [(seconds, theory) for seconds in slowest(records, "step_seconds")]
        subject = f"parameter server over 100 Mbit/s, {workers} workers, beside theory"
        yield Row(subject, pairs, "s", AS_THEORY)


def slowest(records: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """Seconds of each repeat but the first, of its slowest rank."""
    seconds: dict[int, float] = {}
    for record in records:
        if record.get(name) is not None:
            seconds[record["step"]] = max(record[name], seconds.get(record["step"], 0.0))
    return [seconds[step] for step in sorted(seconds)[1:]]
