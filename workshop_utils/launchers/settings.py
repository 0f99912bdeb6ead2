"""What every place.yaml has in common, whichever target it configures."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

from workshop_utils.jobs import Description, JobError


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
