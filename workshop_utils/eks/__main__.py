"""The command line of `workshop_utils.eks`."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from string import Template
from typing import Annotated

import typer

from workshop_utils.eks.cluster import ROOT, load
from workshop_utils.eks.prices import bill
from workshop_utils.eks.steps import Command, Step, reach, shown, steps, there
from workshop_utils.jobs import JobError

PROGRAMS = ("aws", "eksctl", "kubectl", "helm")
# What the programs say of something that there is none of. They do not say it where they could not ask.
GONE = (
    "(NotFound)",
    "No cluster found",
    "cannot delete context",
    "doesn't have a resource type",
    "no matches for kind",
    "no matching resources found",
    "release: not found",
)
POLL_SECONDS, PATIENCE_SECONDS = 20.0, 1800.0  # for what AWS deletes in its own time

app = typer.Typer(
    add_completion=False, rich_markup_mode=None, help="A cluster on EKS: what it costs, made, taken away."
)


class Failed(Exception):
    """A command that did not do what it was asked to."""


def call(command: Command, given: str = "", keep: bool = False) -> str:
    """Run `command`, with its output to the terminal or, to `keep`, to the caller. Raises Failed where it fails."""
    output = subprocess.PIPE if keep else None
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        with suppress(BrokenPipeError):  # it ended without reading, and will have said why
            process.stdin.write(given)
            process.stdin.close()
        complaints = []
        for line in process.stderr:  # at once: some of these take a quarter of an hour, and report as they go
            typer.echo(line, err=True, nl=False)
            complaints.append(line)
        answer = process.stdout.read() if process.stdout is not None else ""
    if process.returncode:
        said = "".join(complaints[-20:]).strip()
        raise Failed(f"{shlex.join(command)} failed, {process.returncode}: {said}")
    return answer.strip()


def is_there(question: Command) -> bool:
    """The answer to `question`. Raises Failed where there is none, so that no answer is never taken for a no."""
    try:
        call(question, keep=True)
    except Failed as failure:
        if not any(words in str(failure) for words in GONE):
            raise
        return False
    return True


def make(step: Step, kept: dict[str, str]) -> None:
    """Carry `step` out; what it keeps is added to `kept`."""
    if step.unless and is_there(step.unless):
        typer.echo("  there already")
        return
    given = Template((ROOT / step.fill).read_text(encoding="utf-8")).substitute(kept) if step.fill else ""
    for command in step.do:
        answer = call(command, given, keep=bool(step.keep))
        if step.keep and answer in ("", "None"):
            raise Failed(f"{step.why}: no; {shlex.join(command)} found nothing")
        if step.keep:
            kept[step.keep] = answer


def unmake(step: Step) -> None:
    """Take back what `step` has made; what is gone already is no failure."""
    for command in step.undo:
        try:
            call(command)
        except Failed as failure:
            if not any(words in str(failure) for words in GONE):
                raise
            typer.echo("  gone already")
    if step.remains is None:
        return
    listing, deletion = step.remains
    asked: set[str] = set()
    until = time.monotonic() + PATIENCE_SECONDS
    while remaining := set(call(listing, keep=True).split()) - {"None"}:
        for each in sorted(remaining - asked):
            call(tuple(word.replace("$each", each) for word in deletion), keep=True)
        asked |= remaining
        if time.monotonic() > until:
            raise Failed(
                f"{', '.join(sorted(remaining))}: not gone after {PATIENCE_SECONDS / 60:.0f} minutes"
            )
        time.sleep(POLL_SECONDS)


Which = Annotated[
    str, typer.Argument(metavar="CLUSTER", help="cpu, gpu, trainium, or a ClusterConfig's file.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print every command; send nothing.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


@app.command()
def price(which: Which) -> None:
    """What a cluster costs an hour, part by part."""
    typer.echo(bill(load(which)))


@app.command()
def create(which: Which, dry_run: DryRun = False, yes: Yes = False) -> None:
    """Make a cluster, and all that the lessons need in it; go on where it broke off."""
    cluster = load(which)
    typer.echo("\n".join(f"# {line}" for line in bill(cluster).splitlines()))
    if not dry_run:
        _programs()
        if not yes and not typer.confirm("Make it, and pay for it until delete-all?"):
            raise typer.Exit(1)
    kept = {"cluster": cluster.name}
    with _stopping():
        for step in steps(cluster):
            if step.do:
                typer.echo(f"\n# {step.why}\n" + "\n".join(shown(step, cluster)))
            if not dry_run:
                make(step, kept)


@app.command()
def delete_all(which: Which, dry_run: DryRun = False, yes: Yes = False) -> None:
    """Take a cluster away, with the jobs and the data in it; go on where it broke off."""
    cluster = load(which)
    typer.echo(
        f"# takes away {cluster.name} in {cluster.region}: jobs, all data of the file system, the cluster"
    )
    if not dry_run:
        _programs()
        if not yes and not typer.confirm("Delete all of this for good?"):
            raise typer.Exit(1)
    with _stopping():
        present = dry_run or is_there(there(cluster))
        for command in reach(cluster) if present else ():
            typer.echo(shlex.join(command))
            if not dry_run:
                call(command)
        for step in reversed(steps(cluster)):
            lines = list(shown(step, cluster, undo=True))
            if lines and (present or not step.inside):
                typer.echo(f"\n# {step.why}\n" + "\n".join(lines))
                if not dry_run:
                    unmake(step)
    if not dry_run:
        typer.echo(f"\nnothing of {cluster.name} is left")


@contextmanager
def _stopping() -> Iterator[None]:
    """Say what follows from it when a step fails, or somebody interrupts."""
    try:
        yield
    except (Failed, KeyboardInterrupt) as stop:
        typer.echo(f"\n{stop}\n" if isinstance(stop, Failed) else "\ninterrupted", err=True)
        typer.echo("What is there stays, and costs. Run it again to go on, or run delete-all.", err=True)
        raise typer.Exit(130 if isinstance(stop, KeyboardInterrupt) else 1) from None


def _programs() -> None:
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        raise JobError(f"{', '.join(missing)}: not installed; --dry-run does without")


def main() -> None:
    """The command's entry point: mistakes that can be foreseen end in one sentence for each and exit code 2."""
    try:
        app()
    except JobError as error:
        typer.echo(error, err=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
