"""What several commands take, and how they read it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

WORDS = "workshop.words"  # of a command's context: what follows --
Job = Annotated[Path, typer.Argument(help="A job's folder, or its job.yaml.")]
Notebooks = Annotated[list[Path] | None, typer.Argument(help="By default all in notebooks/.")]
Lessons = Annotated[
    Path | None,
    typer.Argument(help="Your own copy of the lessons; by default my_lessons/, beside notebooks/."),
]
PAIRS = "NAME=VALUE for {}; may be repeated."


class WithWords(TyperCommand):
    """A command that keeps the words after `--`, which are for another program, in its context."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[WORDS] = args[at + 1 :]
        try:
            return list(super().parse_args(ctx, args[:at]))
        except Exception as error:  # click's, of which typer may have its own
            if hasattr(error, "message") and not hasattr(error, "param_hint") and at == len(args):
                error.message = f"{error.message}. (The script's own arguments follow --)"
            raise


def named_values(pairs: Sequence[str] | None, example: str, option: str = "--argument") -> dict[str, str]:
    """The values of `pairs` such as `example`, by name. Raises JobError for another form, or a name given twice."""
    from workshop_utils.jobs import JobError  # here, as in all commands: it takes time to import

    values: dict[str, str] = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise JobError(f"{option} is {pair!r}; it must be NAME=VALUE, such as {example}")
        if name in values:
            raise JobError(f"{option} {name} is given twice, as {values[name]} and {value}; give it once")
        values[name] = value
    return values


def listed(text: str) -> list[str]:
    """The comma-separated words of `text`."""
    return [word.strip() for word in text.split(",") if word.strip()]
