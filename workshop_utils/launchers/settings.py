"""What every place.yaml has in common, whichever target it configures; and where the workshop's images are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Self

import yaml
from pydantic import Field

from workshop_utils.jobs import Description, JobError
from workshop_utils.launchers.source import PACKAGE

Registry = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.:/_-]*[a-z0-9]$")]
NO_REGISTRY = "REGISTRY/"  # stands for the one that nobody has named; there is no host of that name
# The digest of each image that jobs/images/build.sh has pushed from this checkout, by its full name.
PUSHED = PACKAGE.parent / "jobs" / "images" / "pushed.yaml"


class TargetSettings(Description):
    """The settings of a target, in Python or in a YAML file; `EXAMPLE` is a line of one, for messages."""

    EXAMPLE: ClassVar[str]

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The settings in a YAML file. Raises JobError where there is none, or a field is wrong."""
        file = Path(path)
        if not file.is_file():
            raise JobError(f"there is no file {file}; it must hold settings such as '{cls.EXAMPLE}'")
        return cls._read(file, cls.EXAMPLE)


def workshop_image(name: str, registry: str | None) -> str:
    """The full name of one of the workshop's images, with its digest if it was pushed from here."""
    full = f"{registry}/{name}" if registry else f"{NO_REGISTRY}{name}"
    digests = yaml.safe_load(PUSHED.read_text(encoding="utf-8")) if PUSHED.is_file() else {}
    return f"{full}@{digests[full]}" if full in digests else full


def require_registry(image: str) -> None:
    """Raise JobError for an image of which nobody has said where it is."""
    if image.startswith(NO_REGISTRY):
        raise JobError(
            f"registry is missing; no cluster can pull {image.removeprefix(NO_REGISTRY)}: jobs/images/build.sh builds "
            "and pushes it; then name its registry in a place.yaml, or give image the full name of your own"
        )
