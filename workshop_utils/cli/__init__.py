"""The `workshop` command: launch jobs, run lessons, look at the machine, measure."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator, Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from workshop_utils import optional
from workshop_utils.cli.arguments import PAIRS, WORDS, Lessons, Notebooks, WithWords, listed, named_values
from workshop_utils.cli.scaling import app as scaling_app
from workshop_utils.cli.scaling import scale_model

# Heavy modules (pandas, matplotlib, papermill) are imported by the commands that need them: a launch from the
# command line must not be slower than torchrun's.

app = typer.Typer(
    name="workshop",
    help="Watch distributed training happen: real processes that train one model together.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


TARGETS = (
    "The target: local, slurm, sagemaker, kubernetes; sagemaker-local, kubernetes-local (emulated on this "
    "machine)."
)
STORAGE = "a folder, s3://..., or claim:NAME."
DEVICE = (
    "What each worker computes on: 400ms for a forward and backward pass; more: seconds=400ms,worker-1=3."
)
NETWORK = (
    "A slow link for each process, not for what it starts: 100Mbit, or bandwidth=100Mbit,worker-1=10Mbit."
)
INSTANCES = "Which EC2 instances to look at, with commas between."


@app.command(cls=WithWords)
def launch(
    context: typer.Context,
    job: Annotated[
        Path | None, typer.Argument(help="A job's folder, its job.yaml, or a Python script.")
    ] = None,
    module: Annotated[
        str | None,
        typer.Option("--module", "-m", help="In place of a script, a module of this folder: Python's -m."),
    ] = None,
    strategy: Annotated[str | None, typer.Option(help="How workers co-operate, such as torch_ddp.")] = None,
    on: Annotated[str, typer.Option(help=TARGETS)] = "local",
    config: Annotated[Path | None, typer.Option(help="A place.yaml: settings of the target.")] = None,
    workers: Annotated[int | None, typer.Option(help="How many workers, in place of the job's own.")] = None,
    nodes: Annotated[int | None, typer.Option(help="On how many nodes.")] = None,
    processes_per_node: Annotated[int | None, typer.Option(help="How many workers share a node.")] = None,
    gpus: Annotated[int | None, typer.Option(help="How many GPUs each worker gets; 0: the CPU.")] = None,
    memory: Annotated[str | None, typer.Option(help="What each worker needs, such as 2Gi.")] = None,
    argument: Annotated[
        list[str] | None, typer.Option("--argument", "-a", help=PAIRS.format("the script"))
    ] = None,
    network: Annotated[str | None, typer.Option(help=NETWORK)] = None,
    emulated_device: Annotated[str | None, typer.Option(help=DEVICE)] = None,
    data: Annotated[
        str | None, typer.Option(help="digits, mnist, a folder, a file; SageMaker: s3://")
    ] = None,
    timeout: Annotated[str | None, typer.Option(help="When a hanging run is ended, such as 10min.")] = None,
    outputs: Annotated[
        str | None, typer.Option("--outputs", "--output", help=f"For the model: {STORAGE}")
    ] = None,
    checkpoints: Annotated[str | None, typer.Option(help=f"For checkpoints: {STORAGE}")] = None,
    requirements: Annotated[
        bool | None, typer.Option(help="Whether the packages of a requirements.txt must be there.")
    ] = None,
    render: Annotated[bool, typer.Option("--render", help="Show what would be sent; start nothing.")] = False,
) -> None:
    """Launch a job and show what its workers print and report. The words after -- go to the script as they are."""
    from workshop_utils.jobs import SHELL_SUFFIXES, JobError, TrainingJob
    from workshop_utils.jobs.imports import meeting_doubt, mpi_doubt
    from workshop_utils.launchers.targets import launcher_for
    from workshop_utils.network import Network

    fields = {
        "strategy",
        "workers",
        "nodes",
        "processes_per_node",
        "data",
        "timeout",
        "outputs",
        "checkpoints",
        "requirements",
    }
    given = {name: value for name, value in locals().items() if name in fields and value is not None}
    if module is not None and job is not None:
        raise JobError(
            f"JOB is {str(job)!r} and --module {module!r}; leave one of them out, arguments follow --"
        )
    if module is not None:
        described = TrainingJob.of_script(module=module, **given)
    elif job is None:
        raise JobError("JOB is missing: name a job's folder, a Python script, or a module after -m")
    elif job.suffix in (".py", *SHELL_SUFFIXES):
        described = TrainingJob.of_script(job, **given)
    else:
        described = TrainingJob.load(job).replace(**given)
    described = described.replace(arguments=named_values(argument, "epochs=5"))
    if words := context.meta.get(WORDS):
        described = described.replace(arguments=[*described.command_line_arguments, *words])
    amounts = {name: value for name, value in (("gpu", gpus), ("memory", memory)) if value is not None}
    if amounts:
        described = described.replace(
            resources={**described.resources.model_dump(exclude_unset=True), **amounts}
        )
    launcher = launcher_for(
        on, config, Network.parse(network) if network is not None else None, emulated_device
    )
    if on != "local":  # which says so itself
        is_one = described.workers == 1 or described.nodes == 1
        for doubt in filter(None, (mpi_doubt(described), "" if is_one else meeting_doubt(described))):
            typer.echo(f"warning: {doubt}", err=True)
    if render:
        typer.echo(repr(launcher.render(described)))
        return
    run = None
    with _signals_interrupt() as caught:
        try:
            run = launcher.launch(described)
            for detail in ("network", "device", "answered_by", "warning"):  # what some targets' runs can tell
                if getattr(run, detail, None):
                    typer.echo(f"{detail.replace('_', ' ')}: {getattr(run, detail)}")
            # Only now: the ranks start while the display is imported.
            from workshop_utils.cli import terminal

            if caught:  # an import may take an interrupt for a reason to do without something
                raise KeyboardInterrupt
            terminal.show(run)
        except (KeyboardInterrupt, RuntimeError) as error:
            # Python makes a RuntimeError of an interrupt that comes while the start of a thread lets go of a lock.
            came = error.__context__ if type(error) is RuntimeError else error
            if not isinstance(came, KeyboardInterrupt):
                raise
            if run is not None:  # otherwise the launcher has taken back what it had begun
                run.stop()
            with contextlib.suppress(OSError):  # the terminal may be closed
                typer.echo(f"{described.name}: stopped, nothing is left running", err=True)
            raise typer.Exit(128 + (caught or [signal.SIGINT])[0]) from None


@app.command()
def logs(
    run: Annotated[
        str | None, typer.Argument(help="A job's name, or that of one run; else the last.")
    ] = None,
) -> None:
    """Show what each process of a run has printed, and where these files are; the last 20 runs are kept."""
    from workshop_utils.jobs import JobError
    from workshop_utils.logs import is_of, printable, runs

    there = runs()
    folder = next((each for each in there if run is None or is_of(run, each)), None)
    if folder is None:
        known = ", ".join(each.name for each in there)
        raise JobError(f"there is no run {run!r}; there are: {known}" if known else "there are no logs yet")
    for file in sorted(folder.glob("*.log"), key=lambda path: (len(path.name), path.name)):
        print(f"==> {file.stem} <==")  # by one stream, as the lines: typer has another in a terminal of ASCII
        with file.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                sys.stdout.write(printable(line) if sys.stdout.isatty() else line)
    print(f"these files are in {folder}")


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="A manifest of Kubernetes, or a shell file.")],
    output: Annotated[
        Path | None,
        typer.Option(help="The folder for both; by default FILE's, or this one if only it has the script."),
    ] = None,
) -> None:
    """Turn a job of another tool's into job.yaml and place.yaml, and list what was dropped or changed."""
    from workshop_utils.launchers.importing import import_file

    typer.echo(import_file(file, output))


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[list[int]]:
    """Let a closed terminal, and a polite kill, end a run as Ctrl-C does, once; the list holds what came."""
    caught: list[int] = []

    def interrupt(number: int, _: object) -> None:
        caught.append(number)
        if len(caught) == 1:
            raise KeyboardInterrupt

    names = ("SIGTERM", "SIGHUP")  # Windows has no SIGHUP, and nohup ignores it
    signals = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {each: signal.getsignal(each) for each in signals if signal.getsignal(each) != signal.SIG_IGN}
    for each in before:
        signal.signal(each, interrupt)
    try:
        yield caught
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@app.command()
def run(
    notebooks: Notebooks = None,
    output: Annotated[Path, typer.Option(help="Where executed notebooks and the report go.")] = Path("build"),
    parameter: Annotated[
        list[str] | None, typer.Option("--parameter", "-p", help=PAIRS.format("notebooks that have it"))
    ] = None,
    scale_model: Annotated[
        bool, typer.Option(help="Measure how training scales on a scale model of a cluster.")
    ] = True,
) -> None:
    """Execute notebooks in order and write one HTML report; the exit code says whether all succeeded."""
    from workshop_utils.lessons import batch

    parameters = named_values(parameter, "workers=4", "--parameter")
    raise typer.Exit(batch.run_lessons(notebooks or [], output, parameters, scale_model))


@app.command()
def refresh(
    notebooks: Annotated[list[Path] | None, typer.Argument(help="By default those that are stale.")] = None,
) -> None:
    """Execute notebooks in place, so that their outputs belong to their code."""
    from workshop_utils.lessons import freshness, selection

    named = selection.notebook_paths(notebooks or ())
    for path in named if notebooks else [path for path in named if not freshness.is_fresh(path)]:
        typer.echo(f"executing {path}")
        freshness.refresh_notebook(path)


@app.command()
def copy_lessons(folder: Lessons = None) -> None:
    """Bring the learner's edition of all lessons into your folder; what you have changed there is left alone."""
    from workshop_utils.lessons import editions

    _tell(editions.copy_for_learner(folder or editions.default_folder()))


def _tell(copies: Mapping[Path, str]) -> None:
    for path, state in copies.items():
        if state != "unchanged":
            typer.echo(f"{path}: {'left alone, since you have changed it' if state == 'yours' else state}")


@app.command()
def lab(folder: Lessons = None) -> None:
    """Open JupyterLab on your copy of the lessons; a lesson installs what else it needs when you run it."""
    from workshop_utils.setup.lab import below_working_folder, move_to_complete_environment, open_lab

    move_to_complete_environment(["lab", *([] if folder is None else [str(folder)])])
    from workshop_utils.lessons import editions

    folder = folder or editions.default_folder()
    below_working_folder(folder)
    is_new = not folder.exists()
    copies = editions.copy_for_learner(folder)
    _tell(copies)
    open_lab(next(iter(copies)) if is_new else folder)


@app.command()
def release(
    notebooks: Notebooks = None,
    output: Annotated[Path, typer.Option(help="Where the two editions go.")] = Path("build/editions"),
) -> None:
    """Make the learner's edition (no solutions, no outputs) and the instructor's (both, times, talking points)."""
    from workshop_utils.lessons import editions

    written = editions.release(output, notebooks or [])
    typer.echo(f"{len(written)} notebooks in {output / 'learner'} and {output / 'instructor'}")


@app.command()
def grade(
    folder: Annotated[Path, typer.Argument(help="A folder for each learner, with their notebooks in it.")],
    output: Annotated[Path, typer.Option(help="Where table and notebooks go.")] = Path("build/grades"),
    seconds: Annotated[float, typer.Option(min=1, help="At most so long for one notebook.")] = 600,
    sandbox: Annotated[
        bool, typer.Option(help="Run notebooks in bubblewrap, or with your own rights.")
    ] = True,
) -> None:
    """Run what a class has handed in, each notebook by itself, and print a table of how the exercises went."""
    from workshop_utils.lessons import grading

    rows = []
    for graded in grading.grade_class(folder, output, seconds, sandbox):
        rows += graded
        typer.echo(f"{graded[0]['learner']}, {graded[0]['lesson']}: {grading.summary(graded)}")
    typer.echo(f"\n{grading.grades_table(rows).to_string(index=False)}")
    typer.echo(f"\nthe checks' messages are in {grading.write_grades(rows, output)}")


@app.command()
def doctor() -> None:
    """Say what this machine has, and what that means for the lessons."""
    from workshop_utils.setup import doctor as machine

    machine.show(machine.examine())


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="Such as llama-3.1-8b.")],
    tokens: Annotated[float, typer.Option(help="How many tokens to train on, such as 100e9.")],
    deadline: Annotated[str | None, typer.Option(help="How long it may take, such as 14d or 36h.")] = None,
    budget: Annotated[float | None, typer.Option(help="What it may cost, in dollars.")] = None,
    instances: Annotated[str | None, typer.Option(help=INSTANCES)] = None,
    batch: Annotated[float | None, typer.Option(help="Tokens in a step; by default as published.")] = None,
    fastest: Annotated[bool, typer.Option("--fastest", help="Minimize time instead of cost.")] = False,
) -> None:
    """Plan a training run: the layout, how many of which machines, how long and how much; starts nothing.

    The exit code is 1 if nothing meets the limits; the answer then says what would be enough.
    """
    from workshop_utils.scaling.plan import plan_run

    found = plan_run(
        model,
        tokens,
        deadline,
        budget,
        None if instances is None else listed(instances),
        batch_tokens=batch,
        fastest=fastest,
    )
    typer.echo(str(found))
    raise typer.Exit(0 if found.best else 1)


app.add_typer(scaling_app, name="scaling")
app.command()(scale_model)


@app.command()
def trace(
    folder: Annotated[Path, typer.Argument(help="Where the ranks have left theirs: OUTPUTS/traces.")],
    output: Annotated[Path | None, typer.Option(help="By default merged.json.gz in FOLDER.")] = None,
) -> None:
    """Merge the ranks' traces into one file, and print how much communication each step did not hide."""
    from workshop_utils.scaling import traces

    ranks = traces.read_traces(folder)
    output = output or folder / "merged.json.gz"
    traces.write_merged(ranks, output)
    times = traces.step_times(ranks)
    rows = times.astype({"step": object, "rank": object})
    rows.loc[len(rows)] = ["median", "", *times.iloc[:, 2:].median()]
    typer.echo(rows.round(1).to_string(index=False))
    if not times["communication_ms"].any():
        why = (
            "on CPUs, PyTorch records only torch.distributed's"
            if len(ranks) > 1
            else "one rank sends nothing"
        )
        typer.echo(f"no communication is in these traces: {why}")
    merged = f"{output} has {len(ranks)} of {ranks[0].world_size} ranks"
    typer.echo(
        f"communication includes waiting for other ranks; {merged}: open it in https://ui.perfetto.dev or chrome://tracing"
    )


@app.command()
def clean_up(
    region: Annotated[
        str | None, typer.Option(help="By default AWS_REGION, AWS_DEFAULT_REGION, us-east-1.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove without asking.")] = False,
) -> None:
    """List what the workshop has left in a region of your AWS account, whoever made it, and remove it if you agree."""
    from workshop_utils.launchers.sagemaker import account, cleanup

    aws = account.profile(region)
    typer.echo(f"looking at {aws}")
    remains, unseen = cleanup.find(aws)
    nothing = "nothing of the workshop was found" + (" where this could look" if unseen else "")
    typer.echo("\n".join(f"  {thing}" for thing in remains) or nothing)
    typer.echo("other regions, and Studio's spaces, were not looked at")
    typer.echo("".join(f"could not look at {what}\n" for what in unseen), err=True, nl=False)
    if remains and not yes and not typer.confirm("Remove all of this for good, whoever made it?"):
        typer.echo("nothing was removed")
        return
    is_refused = False
    for thing in remains:
        try:
            cleanup.remove(thing, aws)
        except account.AwsError as error:  # one that is not ours to remove must not keep the rest
            is_refused = True
            typer.echo(f"could not remove {thing.kind} {thing.name}: {error}", err=True)
        else:
            typer.echo(f"removed {thing.kind} {thing.name}")
    raise typer.Exit(int(is_refused))


@app.command()
def install(
    extras: Annotated[
        list[str], typer.Argument(metavar="EXTRA...", help=f"{', '.join(optional.MODULES)}, or all.")
    ],
) -> None:
    """Install the packages of EXTRA into this environment; `workshop doctor` says which lesson needs which."""
    from functools import partial

    from workshop_utils.setup import install as setup
    from workshop_utils.setup import logged_command

    raise typer.Exit(logged_command.exit_code(partial(setup.install, extras), "The installation stopped"))


def main() -> None:
    """The command's entry point: mistakes that can be foreseen end in one sentence and exit code 2."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what the terminal cannot show
    try:
        app()
    except SystemExit as leaving:
        # Another Ctrl-C is not to show where Python is in its own end.
        if leaving.code == 128 + signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise
    except ModuleNotFoundError as error:
        extra = optional.EXTRAS.get(str(error.name).partition(".")[0])
        if extra is None or not optional.missing(extra):
            raise
        print(f"workshop: {optional.sentence(extra)}", file=sys.stderr)
        sys.exit(2)
    except (ValueError, OSError) as error:
        if type(error) is ValueError:  # a bug of ours; JobError, DataError and their like are foreseen
            raise
        reason = str(error)
        if isinstance(error, OSError) and error.filename:  # a file where a folder should be, no rights
            reason = f"{error.filename} cannot be used: {error.strerror}"
        print(f"workshop: {reason}", file=sys.stderr)
        sys.exit(2)
