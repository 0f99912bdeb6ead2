"""Measure one job with several numbers of workers, each several times.

    job = TrainingJob.load("jobs/mnist_torch_ddp")
    settings = [Setting(job.replace(workers=count), repeat=repeat) for repeat in range(3) for count in (1, 2, 4)]
    table = measure_all(settings, Store.default())     # a row a run; what was measured before is not measured again
    summary(table)                                     # medians, and the efficiency of weak scaling

Every run is launched as a job, and its rows are kept as soon as it has ended, under a key of all that it depends on:
the job, its script and data, this package, the network and how it is emulated, the machine, the versions. So an
interrupted sweep goes on where it was, and after a change of any of these it is measured again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import platform
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from workshop_utils.cache import cache_folder
from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.network import Network
from workshop_utils.network.devices import EmulatedDevice
from workshop_utils.runs import Run, RunFailed, RunState
from workshop_utils.setup.machine import cores
from workshop_utils.strategies import strategy_of

BATCH = "batch-size"  # the argument that says how many examples a worker takes in a step
BAR = "{desc} {n}/{total} |{bar:30}| {elapsed}<{remaining}"  # of progress
FULL_SPEED = "full speed"  # where no network is emulated
FRAMEWORKS = ("numpy", "torch", "tensorflow", "tensorflow-cpu", "horovod", "mpi4py")
PACKAGE = Path(__file__).parents[1]
SHOWN = ("step_seconds", "samples_per_second", "first_step_seconds", "loss", "accuracy")  # in a summary
# The columns of a row, beside its arguments; those of an emulated device only where there is one.
COLUMNS = {
    *("job", "strategy", "workers", "network", "emulation", "repeat"),
    *("state", "reason", "run_seconds", "measured_at", "key", *SHOWN, "efficiency"),
}
DEVICE_COLUMNS = {"device", "host_share", "remark"}


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
    """One run: a job, behind a network or at full speed, for the `repeat`-th time (from 0).

    Raises:
        JobError: if an argument of the job has the name of a column: the table could not hold both.
    """

    job: TrainingJob
    network: Network | None = None
    repeat: int = 0
    device: EmulatedDevice | None = None

    def __post_init__(self) -> None:
        spelled = Counter(name.replace("-", "_") for name in self.job.named_arguments)
        columns = COLUMNS if self.device is None else COLUMNS | DEVICE_COLUMNS
        for name, value in self.job.named_arguments.items():
            column = name.replace("-", "_")
            if column in columns or spelled[column] > 1:
                raise JobError(
                    f"arguments.{name} is {value!r}; the table of measurements has a column of that name, "
                    "so the script must name it differently"
                )

    @property
    def emulation(self) -> str:
        """What makes the network slow. Raises JobError where nothing here can."""
        return FULL_SPEED if self.network is None else self.network.emulation(strategy_of(self.job))

    def key(self) -> str:
        """A name for all that its result depends on."""
        depends_on = {
            "job": self.job.model_dump(mode="json"),
            "data": {name: _state_of(Path(source)) for name, source in self.job.channels.items()},
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
        return {
            "job": self.job.name,
            "strategy": self.job.strategy,
            "workers": self.job.workers,
            "network": FULL_SPEED if self.network is None else str(self.network),
            "emulation": self.emulation,
            **({} if self.device is None else {"device": str(self.device)}),
            **{name.replace("-", "_"): value for name, value in sorted(self.job.named_arguments.items())},
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


def measure_all(settings: Sequence[Setting], store: Store, progress: bool = True) -> pd.DataFrame:
    """Run what `store` does not have yet; a table of all `settings`, in order, a row a run.

    A run that fails is a row whose `state` says so, and is tried again next time, like one on emulated devices with a
    `remark` (`network.devices.host_remark`).

    Returns:
        The columns of `Setting.described`; `state`, `reason`, `run_seconds` and `measured_at`; what `reported` finds;
        on emulated devices `host_share`, the part of this machine's cores that the workers kept busy, and `remark`;
        and `key`.
    """
    tables = []
    with progress_bar(settings, "measuring", disable=not progress) as bar:
        for setting in bar:
            key = setting.key()
            table = store.get(key)
            if table is None:
                row = measure_once(setting) | {"key": key}
                table = pd.DataFrame([row])
                if row["state"] == RunState.SUCCEEDED and not row.get("remark"):
                    table = store.put(key, table)  # others may have failed by chance, or the machine was busy
            tables.append(table)
    return pd.concat(tables, ignore_index=True)


def progress_bar(items: Sequence[Any], title: str, disable: bool = False) -> tqdm:
    """On standard error, as usual; in a notebook on standard output, since there the other looks like a mistake."""
    file = sys.stdout if type(sys.stdout).__module__.startswith("ipykernel") else sys.stderr
    return tqdm(items, title, bar_format=BAR, disable=disable, file=file)


def measure_once(setting: Setting) -> dict[str, Any]:
    """Run `setting` once on this machine; the row of `measure_all`, also of a run that failed."""
    launcher = Local(network=setting.network, warm=True, emulated_device=setting.device)
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
        return setting.described() | outcome | reported(setting.job, run)


def reported(job: TrainingJob, run: Run) -> dict[str, Any]:
    """What the workers of a finished run have reported; NaN where nothing was.

    `samples_per_second` of all workers; `first_step_seconds`, from the launch to the first report; the last `loss` and
    `accuracy`, means of the workers. Where they report `step_seconds`, the median step of the slowest worker, without
    the first step, in which connections open up; and samples per second by that.
    """
    metrics = run.metrics.copy()
    for name in {"loss", "accuracy", "samples_per_second", "step_seconds"} & {*metrics.columns}:
        metrics[name] = pd.to_numeric(metrics[name], errors="coerce")  # a script may report words
    last = metrics.groupby("worker")[["loss", "accuracy", "samples_per_second"]].last()  # that is not NaN
    row = {
        "samples_per_second": float(last["samples_per_second"].sum(min_count=1)),
        "first_step_seconds": float(metrics["seconds"].min()),
        "loss": float(last["loss"].mean()),
        "accuracy": float(last["accuracy"].mean()),
    }
    if "step_seconds" in metrics:
        slowest = metrics.dropna(subset=["step_seconds"]).groupby("step")["step_seconds"].max()
        row["step_seconds"] = float(slowest.iloc[int(len(slowest) > 1) :].median())
        if BATCH in job.named_arguments:
            row["samples_per_second"] = job.workers * int(job.named_arguments[BATCH]) / row["step_seconds"]
    return row


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """A row a number of workers: medians over its repeats that succeeded, and the `efficiency` of weak scaling.

    That is each worker's speed, in steps or samples, over that with the fewest workers.

    Raises:
        JobError: if no run has succeeded and reported either.
    """
    speed = "step_seconds" if "step_seconds" in table else "samples_per_second"
    fine = table[(table["state"] == "succeeded") & table[speed].notna()]
    if fine.empty:
        raise JobError(
            "no run has succeeded and said how fast it was; the job's script must report step_seconds or "
            "samples_per_second through place.report"
        )
    rows = fine.groupby("workers", as_index=False)[[name for name in SHOWN if name in table]].median()
    each = 1 / rows[speed] if speed == "step_seconds" else rows[speed] / rows["workers"]
    return rows.assign(efficiency=each / each[0])
