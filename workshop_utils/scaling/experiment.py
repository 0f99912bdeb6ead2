"""Measure one job under many settings: strategies × workers × arguments × networks, each several times.

    job = TrainingJob.load("jobs/measure_step")
    settings = grid(job, strategies=["ring", "torch_ddp"], workers=[1, 2, 4], networks=["100Mbit"], width=[256, 512])
    table = measure_all(settings, Store.default())     # a row a run; what was measured before is not measured again
    efficiency.summary(table)                          # medians, their number and range

Every run is launched as a job, and its rows are kept as soon as it has ended, under a key of all that it depends on:
the job, its script and data, this package, the network and how it is emulated, the machine, the versions. So an
interrupted sweep goes on where it was, and after a change of any of these it is measured again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import itertools
import json
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from tqdm import tqdm

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.jobs.cache import cache_folder
from workshop_utils.launchers.local import Local
from workshop_utils.network import Network
from workshop_utils.network.devices import EmulatedDevice
from workshop_utils.runs import Run, RunFailed, RunState
from workshop_utils.setup.machine import cores
from workshop_utils.strategies import strategy_of

Scaling = Literal["weak", "strong"]

BATCH = "batch-size"  # the argument that says how many examples a worker takes in a step
BAR = "{desc} {n}/{total} |{bar:30}| {elapsed}<{remaining}"  # of progress
FULL_SPEED = "full speed"  # where no network is emulated
FRAMEWORKS = ("numpy", "torch", "tensorflow", "tensorflow-cpu", "horovod", "mpi4py")
PACKAGE = Path(__file__).parents[1]


def key_of(depends_on: Mapping[str, Any]) -> str:
    """A name for all of `depends_on`, which JSON can hold: equal if and only if every part is."""
    text = json.dumps(depends_on, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class Store:
    """Measurements that outlive the session: one Parquet file a run, in `folder`, named by the run's key.

    With a file a run, an interrupted sweep loses nothing, two sweeps may run at once, and to take a measurement back
    is to delete one file. `pandas.read_parquet(folder)` reads all of them as one table.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @classmethod
    def default(cls) -> Store:
        """The one in the user's cache folder (WORKSHOP_CACHE names another)."""
        return cls(cache_folder() / "measurements")

    def get(self, key: str) -> pd.DataFrame | None:
        """The rows that were put under `key`; None where there are none, or only a damaged file."""
        path = self._path(key)
        if not path.is_file():
            return None
        try:
            return pd.read_parquet(path)
        except (OSError, ValueError):  # pyarrow.ArrowInvalid is a ValueError: not Parquet, or cut short
            return None

    def put(self, key: str, rows: pd.DataFrame) -> pd.DataFrame:
        """Keep `rows` under `key`, in place of what was there, and return them as `get` will."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # A name with a dot in front is none that `read_parquet` of the folder would take for a measurement.
        with tempfile.TemporaryDirectory(prefix=".", dir=self.folder) as folder:
            written = Path(folder) / "rows.parquet"
            rows.to_parquet(written, index=False)
            written.replace(self._path(key))
        return pd.read_parquet(self._path(key))

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.parquet"


@dataclass(frozen=True)
class Setting:
    """One run: a job, behind a network or at full speed, for the `repeat`-th time (from 0)."""

    job: TrainingJob
    network: Network | None = None
    repeat: int = 0
    scaling: Scaling = "weak"  # what it is measured for; the run itself is the same, and so is its key
    device: EmulatedDevice | None = None

    @property
    def emulation(self) -> str:
        """What makes the network slow. Raises JobError where nothing here can."""
        return FULL_SPEED if self.network is None else self.network.emulation(strategy_of(self.job))

    def key(self) -> str:
        """A name for all that its result depends on."""
        depends_on = {
            "job": self.job.model_dump(mode="json"),
            "data": self.job.data and _state_of(Path(self.job.data)),
            "scripts": {path.name: path.read_text("utf-8") for path in self.job.folder.glob("*.py")},
            "package": package(),
            "network": None if self.network is None else self.network.model_dump(mode="json"),
            "emulation": self.emulation,
            "device": None if self.device is None else self.device.model_dump(mode="json"),
            "repeat": self.repeat,
            "machine": machine(),
        }
        return key_of(depends_on)

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
            **({} if self.device is None else {"device": str(self.device)}),
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
    facts = Path("/proc/cpuinfo")  # only Linux has it; `platform.processor` seldom knows the model there
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.is_file() else []
    processor = next((line for line in lines if line.startswith("model name")), platform.processor())
    parts = [platform.platform(), processor, f"{cores()} cores", platform.python_version()]
    for name in FRAMEWORKS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            parts.append(f"{name} {importlib.metadata.version(name)}")
    return tuple(parts)


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
    for repeat, network, name, count, *values in itertools.product(
        range(repeats), links, strategies or (job.strategy,), workers, *arguments.values()
    ):
        chosen = job.replace(strategy=name, workers=count, arguments=dict(zip(names, values, strict=True)))
        if scaling == "strong":
            chosen = chosen.replace(arguments={BATCH: _share(chosen)})
        strategy = strategy_of(chosen)
        if network is not None:
            network.emulation(strategy)
            network.check([spec.name for spec in strategy.plan(chosen)])
        settings.append(Setting(chosen, network, repeat, scaling))
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


def measure_all(
    settings: Sequence[Setting], store: Store, fresh: bool = False, progress: bool = True
) -> pd.DataFrame:
    """Run what `store` does not have yet; a table of all `settings`, in order, a row a run (or a run and size).

    A run that fails is a row whose `state` says so, and is tried again next time, like one on emulated devices with a
    `remark` (`network.devices.host_remark`). With `fresh`, all is measured again.

    Returns:
        The columns of `Setting.described`; `state`, `reason`, `run_seconds` and `measured_at`; what `rows_of` finds; on
        emulated devices `host_share`, the part of this machine's cores that the workers kept busy, and `remark`; `key`
        and `scaling`; and `cached`, true where the row was in the store.
    """
    tables = []
    with progress_bar(settings, "measuring", disable=not progress) as bar:
        for setting in bar:
            key = setting.key()
            kept = None if fresh else store.get(key)
            table = kept if kept is not None else pd.DataFrame(measure_once(setting)).assign(key=key)
            is_sound = (table["state"] == RunState.SUCCEEDED).all()
            if "remark" in table:
                is_sound &= not table["remark"].any()
            if kept is None and is_sound:  # others may have failed by chance, or the machine was busy
                table = store.put(key, table)
            tables.append(table.assign(scaling=setting.scaling, cached=kept is not None))
    return pd.concat(tables, ignore_index=True)


def progress_bar(items: Sequence[Any], title: str, disable: bool = False) -> tqdm:
    """On standard error, as usual; in a notebook on standard output, since there the other looks like a mistake."""
    file = sys.stdout if type(sys.stdout).__module__.startswith("ipykernel") else sys.stderr
    return tqdm(items, title, bar_format=BAR, disable=disable, file=file)


def missing(settings: Sequence[Setting], store: Store) -> list[Setting]:
    """Those that `store` does not have: what `measure_all` would run."""
    return [setting for setting in settings if store.get(setting.key()) is None]


def measure_once(setting: Setting, warm: bool = True) -> list[dict[str, Any]]:
    """Run `setting` once on this machine; the columns of `measure_all`, also of a run that failed.

    A `warm` run forks its workers from a process that has the frameworks loaded.
    """
    launcher = Local(network=setting.network, warm=warm, emulated_device=setting.device)
    with launcher.launch(setting.job) as run:
        with contextlib.suppress(RunFailed):  # its reason becomes a row
            run.wait()
        outcome = {
            "state": str(run.state),
            "reason": run.reason,
            "run_seconds": run.seconds,
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        if setting.device is not None:
            outcome["host_share"] = sum(each["host_share"] for each in run.devices) / cores()
            outcome["remark"] = run.remark
        return [setting.described() | outcome | row for row in rows_of(setting.job, run)]


def rows_of(job: TrainingJob, run: Run) -> Iterator[dict[str, Any]]:
    """What a finished run has reported: one row, or for a job that measures all-reduces one for each size.

    - Of training steps: `step_seconds`, the median step of the slowest worker; the parts of `parts_of`; bytes that a
      worker and the busiest server send and receive in a step; `samples_per_second` of all workers. The first step, in
      which connections open up, is left out.
    - Of all-reduces: `nbytes` and `seconds`, the median of repeats, of the slowest rank in each.
    - Of any other job: `samples_per_second`, of all workers; `first_step_seconds`, from the launch to
      the first report; and the last `loss` and `accuracy`, means of the workers. NaN where nothing was reported.
    """
    metrics = run.metrics
    if "step_seconds" in metrics:
        yield _steps(job, metrics)
    elif "all_reduce_seconds" in metrics:
        calls = int(job.arguments.get("calls", 1))
        slowest = metrics.groupby(["nbytes", "step"])["all_reduce_seconds"].max().dropna()
        for nbytes, seconds in slowest.groupby("nbytes").median().reset_index().to_numpy().tolist():
            yield {"nbytes": int(nbytes), "seconds": seconds / calls}
    else:
        by_worker = metrics.groupby("worker")
        last = by_worker[["loss", "accuracy", "samples_per_second"]].last()  # the last that is not NaN
        yield {
            "samples_per_second": float(last["samples_per_second"].sum(min_count=1)),
            "first_step_seconds": float(metrics["seconds"].min()),
            "loss": float(last["loss"].mean()),
            "accuracy": float(last["accuracy"].mean()),
        }


def _steps(job: TrainingJob, metrics: pd.DataFrame) -> dict[str, Any]:
    steps = metrics.dropna(subset=["step_seconds"])
    if steps["step"].nunique() > 1:
        steps = steps[steps["step"] > steps["step"].min()]
    slowest = steps.groupby("step")["step_seconds"].max()
    row: dict[str, Any] = {"step_seconds": float(slowest.median())}
    if "communication_seconds" in steps:
        row |= {name: float(values.median()) for name, values in parts_of(steps).items()}
    if "gradient_nbytes" in steps:
        row["gradient_nbytes"] = int(steps["gradient_nbytes"].iloc[0])
    row |= {name: float(steps[name].median()) for name in ("bytes_sent", "bytes_received") if name in steps}
    servers = metrics[metrics["worker"].str.startswith("server")]
    if "bytes_received" in servers and len(servers):
        row["server_bytes_received"] = float((servers["bytes_received"] / servers["step"]).max())
    if BATCH in job.arguments:
        row["samples_per_second"] = job.workers * int(job.arguments[BATCH]) / row["step_seconds"]
    row["loss"] = float(steps[steps["step"] == steps["step"].max()]["loss"].mean())
    return row


def parts_of(steps: pd.DataFrame) -> dict[str, pd.Series[float]]:
    """Where the seconds of each step went, a value a step; together they are the slowest worker's step.

    `compute_seconds` is the workers' mean. Of communication, the part that no worker escapes is `transfer_seconds`
    (that of the one who waits least), and what the others have more on average `waiting_seconds`: for slower workers,
    and for their turn at a link. `other_seconds` is the rest: changing the parameters, and by how much the
    slowest worker is behind the mean.
    """
    by_step = steps.groupby("step")
    compute, communication = by_step["compute_seconds"].mean(), by_step["communication_seconds"]
    transfer = communication.min()
    parts = {"compute": compute, "transfer": transfer, "waiting": communication.mean() - transfer}
    parts["other"] = by_step["step_seconds"].max() - sum(parts.values())
    return {f"{name}_seconds": seconds for name, seconds in parts.items()}


def mnist_jobs(folder: str | Path, workers: Sequence[int], **arguments: Any) -> list[TrainingJob]:
    """The job `mnist_STRATEGY` of each strategy in `folder`, with these `arguments`, for each number of workers."""
    jobs = []
    for path in sorted(Path(folder).glob("mnist_*/job.yaml")):
        job = TrainingJob.load(path)
        if path.parent.name != f"mnist_{job.strategy}":  # mnist_fsdp cuts another batch
            continue
        for count in workers:
            candidate = job.replace(workers=count, arguments=arguments)
            with contextlib.suppress(JobError):  # such as two workers of `single`
                strategy_of(candidate)
                jobs.append(candidate)
    return jobs


def short(network: Network) -> str:
    """As `Network.parse` reads it, in one word where it can be."""
    settings = network.model_dump(mode="json", exclude_defaults=True)
    settings |= settings.pop("exceptions", {})
    return settings.pop("bandwidth") + "".join(f",{name}={value}" for name, value in settings.items())
