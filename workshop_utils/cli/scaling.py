"""`workshop scaling`: measure a sweep, fit it, predict larger ones, and write it all down as one page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workshop_utils.cli.arguments import Job, listed, named_values

if TYPE_CHECKING:
    import pandas as pd

# Heavy modules are imported by the commands that need them, as in `cli`.

app = typer.Typer(
    name="scaling",
    help="Measure how training scales, fit what it costs, predict what more workers would do.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

# Not arguments of the script.
GRID_OPTIONS = ("job", "strategies", "workers", "network", "repeats", "scaling")
TABLE = Path("build/scaling.parquet")
File = Annotated[Path, typer.Argument(help="A table that `workshop scaling measure` has written.")]


Listed = Annotated[str, typer.Option(help="How many, with commas between.")]


@app.command()
def measure(
    job: Job = Path("jobs/measure_step"),
    strategies: Annotated[str, typer.Option(help="With commas between; the job's own by default.")] = "",
    workers: Listed = "1,2,4",
    network: Annotated[list[str] | None, typer.Option(help="Such as 100Mbit; may be repeated.")] = None,
    argument: Annotated[
        list[str] | None, typer.Option("--argument", "-a", help="NAME=VALUE,VALUE; may be repeated.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often each is measured, in turns.")] = 3,
    strong: Annotated[bool, typer.Option("--strong", help="The workers share the batch.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what was measured before.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be run; start nothing.")] = False,
    output: Annotated[Path, typer.Option(help="The table, as Parquet.")] = TABLE,
) -> None:
    """Launch every combination as a job and keep what it measured; what was measured before is not run again.

    Interrupt it whenever you like: what has been measured stays, and the next call goes on from there.
    """
    from workshop_utils.jobs import TrainingJob
    from workshop_utils.scaling import efficiency, experiment

    settings = experiment.grid(
        TrainingJob.load(job),
        listed(strategies),
        _counts(workers),
        network or [None],
        repeats,
        "strong" if strong else "weak",
        **_swept(argument),
    )
    store = experiment.Store.default()
    todo = settings if fresh else experiment.missing(settings, store)
    typer.echo(f"{len(settings)} runs, {len(settings) - len(todo)} of them measured before")
    if dry_run:
        for setting in todo:
            typer.echo("  " + "  ".join(f"{name}={value}" for name, value in setting.described().items()))
        return
    table = experiment.measure_all(settings, store, fresh)
    output.parent.mkdir(parents=True, exist_ok=True)
    table.to_parquet(output, index=False)
    if "step_seconds" in table:
        rows = efficiency.scaling(table).round(4)
        typer.echo(rows[[name for name in efficiency.SHOWN if name in rows]].to_string(index=False))
    failures = efficiency.failures(table)
    for sentence in failures:
        typer.echo(f"failed: {sentence}")
    typer.echo(f"the table is {output}")
    if failures:
        raise typer.Exit(1)


@app.command()
def fit(
    table: File = TABLE,
    hold_out: Annotated[str, typer.Option(help="Numbers of workers to predict unseen, such as 8.")] = "",
) -> None:
    """Fit latency and bandwidth to what was measured, with 95 % intervals."""
    from workshop_utils.scaling import extrapolate

    held = _counts(hold_out) if hold_out else []

    def shown(runs: pd.DataFrame) -> str:
        text = str(extrapolate.fit_steps(runs[~runs["workers"].isin(held)]))
        if held:
            text += f"\nheld out:\n{extrapolate.held_out(runs, held).round(4).to_string(index=False)}"
        return text

    for name, text in _of_each(table, shown):
        typer.echo(f"{name}\n{text}\n")


@app.command()
def predict(table: File = TABLE, workers: Listed = "8,64,1000") -> None:
    """Predict steps with more workers: by the closed form, with its interval, and by the simulated clock."""
    import pandas as pd

    from workshop_utils.scaling import extrapolate

    counts = _counts(workers)
    tables = [each for _, each in _of_each(table, lambda runs: extrapolate.predict_steps(runs, counts))]
    typer.echo(pd.concat(tables).round(4).to_string(index=False))
    typer.echo(
        "\nEach worker is taken to have a core of its own, and each link to be as those measured. Links that workers "
        "share, machines and stragglers are not in it: see lessons 10 and 15."
    )


@app.command()
def report(
    table: File = TABLE,
    output: Annotated[Path, typer.Option(help="The folder of the page, scaling.html.")] = Path("build"),
) -> None:
    """Write one page: what was measured, and where the time went."""
    from workshop_utils.lessons import report as page

    written = page.write_report(output / "scaling.html", "How training scales", runs=_read(table))
    typer.echo(f"the report is {written}")


def scale_model(
    cluster: Annotated[str, typer.Argument(help="Such as p3.2xlarge.")],
    model: Annotated[str, typer.Option(help="Such as vgg16, resnet50, bert-base or gpt-1b.")] = "resnet50",
    strategy: Annotated[
        str, typer.Option(help="ring, workshop_parameter_server, torch_ddp, horovod.")
    ] = "ring",
    workers: Annotated[
        str, typer.Option(help="How many devices in all, with commas between.")
    ] = "1,2,4,8,16",
    batch: Annotated[int | None, typer.Option(help="Examples a device; by default as published.")] = None,
    faster_link: Annotated[float, typer.Option(help="What if the link were so many times as fast?")] = 1.0,
    repeats: Annotated[int, typer.Option(min=1, help="How often each is measured.")] = 1,
    predict: Annotated[bool, typer.Option("--predict", help="By formula alone; start nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for another program.")] = False,
) -> None:
    """Emulate a cluster on this machine: real gradients and messages, slowed links, devices that take their time.

    What was measured before is not run again.
    """
    from workshop_utils.scaling.experiment import Store
    from workshop_utils.scaling.scale_model import ScaleModel

    scaled, counts = ScaleModel.of(cluster, model, strategy, batch, faster_link), _counts(workers)
    rows = scaled.predict(counts) if predict else scaled.measure(counts, Store.default(), repeats)
    if as_json:
        typer.echo(rows.to_json(orient="records", indent=2))
        return
    typer.echo(f"{scaled}\n")
    typer.echo(
        rows.drop(columns=["cluster", "model", "strategy", "layer_nbytes"], errors="ignore")
        .round(3)
        .to_string(index=False)
    )
    typer.echo(
        "\nEfficiency: weak scaling, over one device without any exchange. "
        + (
            "By formula alone."
            if predict
            else "Measured on emulated devices and links; `predicted` is by formula."
        )
    )


def _of_each(path: Path, calculate: Callable[[pd.DataFrame], Any]) -> list[tuple[str, Any]]:
    """The result of `calculate` for the runs of each strategy and network; what it refuses is named, and left out.

    Raises:
        JobError: if it refuses all.
    """
    from workshop_utils.jobs import JobError
    from workshop_utils.scaling import extrapolate

    results = []
    for names, runs in extrapolate.swept(_read(path)):
        try:
            results.append((", ".join(map(str, names)), calculate(runs)))
        except JobError as error:
            typer.echo(f"left out: {error}", err=True)
    if not results:
        raise JobError(f"no strategy and network in {path} can be used, for the reasons above")
    return results


def _read(path: Path) -> pd.DataFrame:
    import pandas as pd

    from workshop_utils.jobs import JobError

    if not path.is_file():
        raise JobError(f"there is no table {path}; `workshop scaling measure` writes one")
    try:
        return pd.read_parquet(path)
    except (OSError, ValueError):
        raise JobError(
            f"{path} is no Parquet file; it must be one that `workshop scaling measure` has written"
        ) from None


def _counts(text: str) -> list[int]:
    from workshop_utils.jobs import JobError

    words = listed(text)
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise JobError(f"workers is {text!r}; it must be whole numbers with commas between, such as 1,2,4")
    return [int(word) for word in words]


def _swept(pairs: list[str] | None) -> dict[str, list[Any]]:
    """NAME=VALUE,VALUE as names with `_` and lists of values, read as YAML so that 4 is a number."""
    import yaml

    from workshop_utils.jobs import JobError

    swept = {}
    for name, text in named_values(pairs, "width=256,512").items():
        if not all(text.split(",")):
            raise JobError(f"--argument is '{name}={text}'; it must be NAME=VALUE, such as width=256,512")
        if name in GRID_OPTIONS:
            raise JobError(f"--argument is '{name}={text}'; {name} has an option of its own: --{name}")
        try:
            swept[name.replace("-", "_")] = [yaml.safe_load(value) for value in text.split(",")]
        except yaml.YAMLError:
            raise JobError(f"--argument is '{name}={text}'; it has no values that YAML can read") from None
    return swept
