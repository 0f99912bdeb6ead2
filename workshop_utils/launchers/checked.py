"""What of a launcher was checked by this project's tests, and what never was: `checked.yaml`, as a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from workshop_utils.jobs import JobError

if TYPE_CHECKING:
    import pandas as pd

FILE = Path(__file__).with_name("checked.yaml")


def checked(launcher: str) -> pd.DataFrame:
    """What was checked of `launcher`, such as "sagemaker": columns `what`, `checked here` (yes or no), and `how`.

    Raises:
        JobError: if there is no such launcher.
    """
    import pandas as pd  # here, since it takes longer to import than a launch may take

    rows = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    if launcher not in rows:
        raise JobError(f"launcher is {launcher!r}; it must be one of {', '.join(rows)}")
    listed = [(row["what"], "no", row["not checked"]) for row in rows[launcher] if "not checked" in row]
    tests = [(row["what"], "yes", _words(row["how"])) for row in rows[launcher] if "how" in row]
    return pd.DataFrame(tests + listed, columns=["what", "checked here", "how"])


def _words(how: str | list[str]) -> str:
    """The name of each test, which is a sentence, and its file."""
    named = [test.partition("::") for test in ([how] if isinstance(how, str) else how)]
    return "; ".join(
        f"{name.removeprefix('test_').replace('_', ' ')} ({Path(file).name})" for file, _, name in named
    )
