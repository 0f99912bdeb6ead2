"""Measure one job under many settings: strategies × workers × arguments × networks, each several times.

    job = TrainingJob.load("jobs/measure_step")
    settings = grid(job, strategies=["ring", "torch_ddp"], workers=[1, 2, 4], networks=["100Mbit"], width=[256, 512])
    table = measure_all(settings, Store.default())     # a row a run; what was measured before is not measured again
    efficiency.summary(table)                          # medians, spread, outliers

Every run is launched as a job, and its rows are kept as soon as it has ended, under a key of all that it depends on:
the job, its script and data, this package, the network and how it is emulated, the machine, the versions. So an
interrupted sweep goes on where it was, and after a change of any of these it is measured again.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import itertools
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from tqdm import tqdm

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.network import Network
from workshop_utils.runs import RunFailed, RunState
from workshop_utils.scaling.rows import BATCH, rows_of
from workshop_utils.scaling.store import Store, key_of
from workshop_utils.setup.machine import cores
from workshop_utils.strategies import strategy_of

Scaling = Literal["weak", "strong"]

FULL_SPEED = "full speed"  # where no network is emulated
FRAMEWORKS = ("numpy", "torch", "tensorflow", "tensorflow-cpu", "horovod", "mpi4py")
PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Setting:
    """One run: a job, behind a network or at full speed, for the `repeat`-th time (from 0)."""

    job: TrainingJob
    network: Network | None = None
    repeat: int = 0
    scaling: Scaling = "weak"  # what it is measured for; the run itself is the same, and so is its key

    @property
    def emulation(self) -> str:
        """What makes the network slow. Raises JobError where nothing here can."""
        return FULL_SPEED if self.network is None else self.network.emulation(strategy_of(self.job))

    def check(self) -> None:
        """Raise JobError where it cannot be run here."""
        strategy = strategy_of(self.job)
        if self.network is not None:
            self.network.emulation(strategy)
            self.network.check([spec.name for spec in strategy.plan(self.job)])

    def key(self) -> str:
        """A name for all that its result depends on."""
        network = None if self.network is None else self.network.model_dump(mode="json")
        return key_of(
            {
                "job": self.job.model_dump(mode="json"),
                "data": _state_of(Path(self.job.data)),
                "scripts": {path.name: path.read_text("utf-8") for path in self.job.folder.glob("*.py")},
                "package": package(),
                "network": network,
                "emulation": self.emulation,
                "repeat": self.repeat,
                "machine": machine(),
            }
        )

    def described(self) -> dict[str, Any]:
        """The columns that say what was run; an argument is a column of its own, `batch-size` as `batch_size`."""
        servers = self.job.parameter_servers if strategy_of(self.job).has_servers else 0
        return {
            "job": self.job.name,
            "strategy": self.job.strategy,
            "workers": self.job.workers,
            "servers": servers,
            "network": FULL_SPEED if self.network is None else short(self.network),
            "emulation": self.emulation,
            **{name.replace("-", "_"): value for name, value in sorted(self.job.arguments.items())},
            "repeat": self.repeat,
        }


@functools.cache
def package() -> str:
    """A hash of this package, of which any part may have one in a run."""
    return key_of({str(path): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")})


def _state_of(data: Path) -> Any:
    """For a folder of data, what can be seen from outside: names, sizes, and when each file was changed."""
    if not data.is_dir():
        return str(data)
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(data.iterdir())]


@functools.cache
def machine() -> tuple[str, ...]:
    """What of this machine a measurement depends on: system, processor, cores, versions."""
    found = [platform.platform(), _processor(), f"{cores()} cores", platform.python_version()]
    for name in FRAMEWORKS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return tuple(found)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("model name")), platform.processor())


def grid(
    job: TrainingJob,
    strategies: Sequence[str] = (),
    workers: Sequence[int] = (1, 2, 4),
    networks: Sequence[str | Network | None] = (None,),
    repeats: int = 3,
    scaling: Scaling = "weak",
    **arguments: Sequence[Any],
) -> list[Setting]:
    """All combinations, `repeats` times over; an argument's name is written with `_` for `-`.

    With weak scaling every worker takes `batch-size` examples in a step, however many workers there are. With strong
    scaling it is the batch of all, and each takes its share. The repeats go round: first everything once, then
    everything again, so that what disturbs the machine for a while does not fall on one setting alone.

    Raises:
        JobError: for what cannot be run here, or a batch that the workers cannot share; nothing has been started.
    """
    if repeats < 1:
        raise JobError(f"repeats is {repeats}; it must be at least 1")
    names = [name.replace("_", "-") for name in arguments]
    links = [Network.parse(link) if isinstance(link, str) else link for link in networks]
    settings = []
    for repeat, network, strategy, count, *values in itertools.product(
        range(repeats), links, strategies or (job.strategy,), workers, *arguments.values()
    ):
        chosen = job.replace(
            strategy=strategy, workers=count, arguments=dict(zip(names, values, strict=True))
        )
        if scaling == "strong":
            chosen = chosen.replace(arguments={BATCH: _share(chosen)})
        settings.append(Setting(chosen, network, repeat, scaling))
    for setting in settings:
        setting.check()
    return settings


def _share(job: TrainingJob) -> int:
    """What one worker takes of the batch of all."""
    if BATCH not in job.arguments:
        raise JobError(f"strong scaling shares a batch, and job {job.name!r} has no argument {BATCH}")
    whole = int(job.arguments[BATCH])
    if whole % job.workers:
        raise JobError(
            f"{BATCH} is {whole}; with strong scaling it must be a multiple of {job.workers} workers"
        )
    return whole // job.workers


def measure_all(settings: Sequence[Setting], store: Store, fresh: bool = False) -> pd.DataFrame:
    """Run what `store` does not have yet; a table of all `settings`, in order, a row a run (or a run and size).

    A run that fails is a row whose `state` says so, and is tried again next time. With `fresh`, all is measured again.

    Returns:
        The columns of `Setting.described`; `state` and `reason`; what `rows.rows_of` finds; `measured_at`; and
        `cached`, true where the row was in the store.
    """
    tables = []
    form = "{desc} {n}/{total} |{bar:30}| {elapsed}<{remaining}"
    with tqdm(settings, desc="measuring", unit="run", bar_format=form) as bar:
        for setting in bar:
            key = setting.key()
            kept = None if fresh else store.get(key)
            table = kept if kept is not None else pd.DataFrame(measure_once(setting)).assign(key=key)
            if (
                kept is None and (table["state"] == RunState.SUCCEEDED).all()
            ):  # others may have failed by chance
                table = store.put(key, table)
            tables.append(table.assign(scaling=setting.scaling, cached=kept is not None))
    return pd.concat(tables, ignore_index=True)


def missing(settings: Sequence[Setting], store: Store) -> list[Setting]:
    """Those that `store` does not have: what `measure_all` would run."""
    kept = store.keys()
    return [setting for setting in settings if setting.key() not in kept]


def measure_once(setting: Setting, warm: bool = True) -> list[dict[str, Any]]:
    """Run `setting` once on this machine; the columns of `measure_all`, also of a run that failed.

    A `warm` run forks its workers from a process that has the frameworks loaded.
    """
    with Local(network=setting.network, warm=warm).launch(setting.job) as run:
        with contextlib.suppress(RunFailed):  # its reason becomes a row
            run.wait()
        outcome = {
            "state": str(run.state),
            "reason": run.reason,
            "run_seconds": run.seconds,
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        return [setting.described() | outcome | row for row in rows_of(setting.job, run)]


def mnist_jobs(folder: str | Path, workers: Sequence[int], **arguments: Any) -> list[TrainingJob]:
    """Each `mnist_*` job of `folder` with each number of workers that its strategy can have, and these `arguments`."""
    jobs = []
    for path in sorted(Path(folder).glob("mnist_*/job.yaml")):
        job = TrainingJob.load(path)
        for count in workers:
            candidate = job.replace(workers=count, arguments=arguments)
            with contextlib.suppress(JobError):  # such as two workers of `single`
                strategy_of(candidate)
                jobs.append(candidate)
    return jobs


def short(network: Network) -> str:
    """As `Network.parse` reads it, in one word where it can be."""
    given = network.model_dump(mode="json", exclude_defaults=True)
    exceptions = given.pop("exceptions", {})
    bandwidth = given.pop("bandwidth")
    settings = {**given, **exceptions}
    return bandwidth + "".join(f",{name}={value}" for name, value in settings.items())
