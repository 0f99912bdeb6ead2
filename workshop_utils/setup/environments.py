"""What cannot live in the main environment has one of its own, made on demand and called as a command.

    environment = Environment("torchx", "TorchX")
    environment.run("torchx", "--version")          # makes it first, where it is not there yet

What is in one stands in `requirements/NAME.txt`, with every version fixed; `requirements/NAME.in` beside it says what
was asked for. It lies in the workshop's cache folder, under a name that holds all that it depends on, so that several
checkouts share it and new requirements give a new one. Making it takes seconds, once.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workshop_utils.setup import packages
from workshop_utils.setup.logged_command import LAST_LINES, SetupError, say
from workshop_utils.training import data

REQUIREMENTS = Path(__file__).with_name("requirements")
# These would lead the environment's Python to somebody else's modules.
OUTSIDE = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"}


class EnvironmentFailed(ValueError):
    """An environment could not be made, or a command in it failed; the message says why, and what to do."""

    def _render_traceback_(self) -> list[str]:
        # IPython asks an exception how it wants to be shown: the message is for people, the frames are not.
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the packages of `requirements/NAME.txt`.

    Attributes:
        name: of the requirements file, and of the folder.
        title: what people call it.
        requirements: another file than `requirements/NAME.txt`.
    """

    name: str
    title: str
    requirements: Path | None = None

    @property
    def lock(self) -> Path:
        """The requirements file, every version fixed."""
        return self.requirements or REQUIREMENTS / f"{self.name}.txt"

    @property
    def folder(self) -> Path:
        """Where it belongs: another place for other requirements, and for another Python."""
        python = [sys.base_prefix, sys.version, sys.platform, platform.machine()]
        seed = "\n".join([self.lock.read_text(encoding="utf-8"), *python])
        key = hashlib.sha256(seed.encode()).hexdigest()[:12]
        return data.cache_folder() / "environments" / f"{self.name}-{key}"

    def build(self) -> Path:
        """Make it where it is not there yet, and return its folder.

        uv goes on with one that was interrupted, and where two come at once, lets the second wait.

        Raises:
            EnvironmentFailed: if a step fails, as it does without a network; the message has uv's reason.
        """
        folder, here = self.folder, Path(sys.executable)
        python, ready = folder / "bin" / "python", folder / ".ready"
        if ready.is_file() and python.exists():  # its Python may have been removed from under it
            return folder
        say(f"{self.title}: installing its packages in an environment of their own, once, in {folder}")
        install = ("pip", "sync", "--compile-bytecode", "--python", str(python), str(self.lock))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            packages.run_uv(here, "venv", "--allow-existing", "--python", str(here), str(folder), quiet=True)
            packages.run_uv(here, *install, quiet=True)
            ready.touch()
        except OSError as error:
            raise EnvironmentFailed(
                f"{self.title} cannot have its environment in {folder}: {error.strerror or error}; "
                "name another cache folder in WORKSHOP_CACHE"
            ) from None
        except SetupError as error:
            raise EnvironmentFailed(
                f"the environment of {self.title} could not be made from {self.lock}. {error}\n"
                "  Its packages are downloaded: is there a network, and does pip reach its index?"
            ) from None
        return folder

    def program(self, name: str) -> Path:
        """Where the program called so is, such as `python`. Raises EnvironmentFailed as `build` does."""
        return self.build() / "bin" / name

    def run(
        self,
        program: str,
        *arguments: str,
        timeout_seconds: float | None = None,
        variables: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> str:
        """What a short command in it prints on standard output.

        Its own programs come first on the PATH, then those of the environment that calls it (such as torchrun).

        Raises:
            EnvironmentFailed: if it cannot be made, or the command ends with another code than 0, or takes longer.
        """
        command = [str(self.program(program)), *arguments]
        path = [str(self.folder / "bin"), sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]
        inherited = {name: value for name, value in os.environ.items() if name not in OUTSIDE}
        try:
            answer = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                env={**inherited, "PATH": os.pathsep.join(path), **(variables or {})},
                cwd=folder,
                timeout=timeout_seconds,
            )
        except subprocess.TimeoutExpired:
            raise EnvironmentFailed(f"{program} did not end within {timeout_seconds:g} s") from None
        if answer.returncode != 0:
            lines = (answer.stderr.strip() or answer.stdout.strip() or "it printed nothing").splitlines()
            called = " ".join([program, *arguments[:2]])
            last = "\n  ".join(lines[-LAST_LINES:])
            raise EnvironmentFailed(f"{called} ended with code {answer.returncode}:\n  {last}")
        return answer.stdout
