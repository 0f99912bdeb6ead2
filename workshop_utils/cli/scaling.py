"""`workshop scaling measure` and `workshop scale-model`: how a job scales here, and how a cluster would."""

from __future__ import annotations

from typing import Annotated

import typer

from workshop_utils.cli.arguments import PAIRS, Job, listed, named_values

# Heavy modules are imported by the commands that need them, as in `cli`.

app = typer.Typer(
    name="scaling",
    help="Measure how training scales.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def measure(
    job: Job,
    workers: Annotated[str, typer.Option(help="How many, with commas between.")] = "1,2,4",
    network: Annotated[list[str] | None, typer.Option(help="Such as 100Mbit.")] = None,
    argument: Annotated[
        list[str] | None, typer.Option("--argument", "-a", help=PAIRS.format("the script"))
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often each is measured, in turns.")] = 3,
) -> None:
    """Launch a job with several numbers of workers, and show how it scales.

    What was measured before is not run again, so interrupt it whenever you like: the next call goes on from there.
    """
    from workshop_utils.jobs import JobError, TrainingJob
    from workshop_utils.network import Network
    from workshop_utils.scaling import experiment

    described, arguments = TrainingJob.load(job), named_values(argument, "epochs=5")
    for name, value in arguments.items():
        if "," in value and value[0] not in "[{":  # a list of JSON is one value
            raise JobError(
                f"--argument is '{name}={value}'; it must be one value: measure each in a call of its own"
            )
    if len(network or ()) > 1:
        raise JobError(f"--network is {' and '.join(network or ())}; measure each in a call of its own")
    described = described.replace(arguments=arguments)
    links = Network.parse(network[0]) if network else None
    jobs = [described.replace(workers=count) for count in _counts(workers)]
    # In turns, so that what disturbs the machine for a while does not fall on one number alone.
    settings = [experiment.Setting(each, links, repeat) for repeat in range(repeats) for each in jobs]
    table = experiment.measure_all(settings, experiment.Store.default())
    failed = table[table["state"] != "succeeded"]
    for _, row in failed.iterrows():
        typer.echo(f"failed: {row['workers']} workers: {row['reason']}")
    if len(failed) < len(table):
        typer.echo(experiment.summary(table).round(4).to_string(index=False))
    if len(failed):
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
    predict: Annotated[bool, typer.Option("--predict", help="By formula alone; start nothing.")] = False,
) -> None:
    """Emulate a cluster on this machine: real gradients and messages, slowed links, devices that take their time.

    What was measured before is not run again.
    """
    from workshop_utils.scaling.experiment import Store
    from workshop_utils.scaling.scale_model import ScaleModel

    scaled, counts = ScaleModel.of(cluster, model, strategy, batch, faster_link), _counts(workers)
    rows = scaled.predict(counts) if predict else scaled.measure(counts, Store.default())
    shown = rows.drop(columns=["cluster", "model", "strategy"]).round(3)
    typer.echo(f"{scaled}\n\n{shown.to_string(index=False)}")
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
