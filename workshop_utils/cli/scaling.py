"""`workshop scaling measure` and `workshop scale-model`: how a job scales here, and how a cluster would."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from workshop_utils.cli.arguments import Job, listed, named_values

# Heavy modules are imported by the commands that need them, as in `cli`.

app = typer.Typer(
    name="scaling",
    help="Measure how training scales.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

# Not arguments of the script.
GRID_OPTIONS = ("job", "strategies", "workers", "network", "repeats")
TABLE = Path("build/scaling.parquet")


@app.command()
def measure(
    job: Job,
    strategies: Annotated[str, typer.Option(help="With commas between; the job's own by default.")] = "",
    workers: Annotated[str, typer.Option(help="How many, with commas between.")] = "1,2,4",
    network: Annotated[list[str] | None, typer.Option(help="Such as 100Mbit; may be repeated.")] = None,
    argument: Annotated[
        list[str] | None, typer.Option("--argument", "-a", help="NAME=VALUE,VALUE; may be repeated.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often each is measured, in turns.")] = 3,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what was measured before.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be run; start nothing.")] = False,
    output: Annotated[Path, typer.Option(help="The table, as Parquet.")] = TABLE,
) -> None:
    """Launch every combination as a job and keep what it measured; what was measured before is not run again.

    Interrupt it whenever you like: what has been measured stays, and the next call goes on from there.
    """
    from workshop_utils.jobs import TrainingJob
    from workshop_utils.scaling import experiment

    settings = experiment.grid(
        TrainingJob.load(job),
        listed(strategies),
        _counts(workers),
        network or [None],
        repeats,
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
    typer.echo(f"the table is {output}")
    failures = experiment.failures(table)
    for sentence in failures:
        typer.echo(f"failed: {sentence}")
    if len(failures) < len(table):
        typer.echo(experiment.summary(table).round(4).to_string(index=False))
    if failures:
        raise typer.Exit(1)


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
