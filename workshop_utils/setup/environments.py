"""Packages that conflict with the main environment get their own, created on demand and used through commands.

    environment = Environment("torchx", "TorchX")
    environment.run("torchx", "--version")          # creates it first if it does not exist

`requirements/NAME.txt` lists an environment's packages, every version fixed; `requirements/NAME.in` lists what was
asked for. An environment lies in the workshop's cache folder, under a name that includes everything it depends on:
several checkouts share it, and new requirements give a new one. Creating one takes seconds, once.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workshop_utils.cache import cache_folder
from workshop_utils.setup.logged_command import SetupError, announce
from workshop_utils.setup.packages import MARKER, REQUIREMENTS, pinned, pytorch_arguments, run_command, run_uv

# These would make the environment's Python import modules from elsewhere.
OUTSIDE = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"}


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the packages of `requirements/NAME.txt`.

    Attributes:
        name: of the requirements file, and of the folder.
        title: the name that messages use.
        requirements: a file to use instead of `requirements/NAME.txt`.
        workshop: instead of such a file, the requirement that brings this package itself: the environment gets it, with
            the versions that were tested, and is the workshop's own to change.
    """

    name: str
    title: str
    requirements: Path | None = None
    workshop: str = ""

    @property
    def lock(self) -> Path:
        """The requirements file, every version fixed."""
        return self.requirements or (
            Path(pinned()[1]) if self.workshop else REQUIREMENTS / f"{self.name}.txt"
        )

    @property
    def folder(self) -> Path:
        """Its place in the cache; other requirements, or another Python, give another folder."""
        python = [sys.base_prefix, sys.version, sys.platform, platform.machine()]
        seed = "\n".join([self.lock.read_text(encoding="utf-8"), self.workshop, *python])
        key = hashlib.sha256(seed.encode()).hexdigest()[:12]
        return cache_folder() / "environments" / f"{self.name}-{key}"

    def build(self) -> Path:
        """Create it if it does not exist yet, and return its folder.

        uv completes an interrupted one, and makes a second process wait for the first.

        Raises:
            SetupError: if a step fails, for example without a network; the message has uv's reason.
        """
        folder, here = self.folder, Path(sys.executable)
        python, ready = folder / "bin" / "python", folder / ".ready"
        if ready.is_file() and python.exists():  # the Python that it links to may have been removed
            return folder
        announce(f"{self.title}: installing its packages in an environment of their own, once, in {folder}")
        sync = ["pip", "sync", "--compile-bytecode", str(self.lock)]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            run_uv(here, "venv", "--allow-existing", "--python", str(here), str(folder), quiet=True)
            if self.workshop:
                sync = ["pip", "install", self.workshop, *pinned(), *pytorch_arguments(python)]
                (folder / MARKER).touch()
            run_uv(here, *sync, "--python", str(python), quiet=not self.workshop)
            ready.touch()
        except OSError as error:
            why = f"{error.strerror or error}; name another cache folder in WORKSHOP_CACHE"
            raise SetupError(f"{self.title} cannot have its environment in {folder}: {why}") from None
        except SetupError as error:
            why = f"{error}\n  Its packages are downloaded: is there a network, and does pip reach its index?"
            failed = f"the environment of {self.title} could not be made from {self.lock}"
            raise SetupError(f"{failed}. {why}") from None
        return folder

    def program(self, name: str) -> Path:
        """The path of one of its programs, such as `python`. Raises SetupError as `build` does."""
        return self.build() / "bin" / name

    def run(
        self,
        program: str,
        *arguments: str,
        timeout_seconds: float | None = None,
        variables: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> str:
        """Run a short command in it and return its standard output.

        On the PATH its own programs come first, then those of the calling environment (such as torchrun).

        Raises:
            SetupError: if the environment cannot be made, or the command fails or takes longer than its time.
        """
        command = [str(self.program(program)), *arguments]
        path = [str(self.folder / "bin"), sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]
        inherited = {name: value for name, value in os.environ.items() if name not in OUTSIDE}
        environment = {**inherited, "PATH": os.pathsep.join(path), **(variables or {})}
        return run_command(command, environment, folder=folder, timeout_seconds=timeout_seconds)
