"""What cannot live in the main environment has one of its own, made on demand and called as a command.

    environment = Environment("torchx", "TorchX")
    environment.run("torchx", "--version")          # makes it first, where it is not there yet

What is in one stands in `requirements/NAME.txt`, with every version fixed; `requirements/NAME.in` beside it says what
was asked for. It lies in the workshop's cache folder, under a name that holds all that it depends on, so that several
checkouts share it and new requirements give a new one. Making it takes seconds, once; an interrupted one is made again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from workshop_utils import data, packages
from workshop_utils.logged_command import CommandFailed, duration, run_logged

REQUIREMENTS = Path(__file__).with_name("requirements")
LAST_LINES = 12  # of a command that failed, in the message


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
        """The requirements file, every version fixed. Raises EnvironmentFailed where there is none."""
        file = self.requirements or REQUIREMENTS / f"{self.name}.txt"
        if not file.is_file():
            raise EnvironmentFailed(f"environment {self.name!r} has no requirements: there is no file {file}")
        return file

    @property
    def folder(self) -> Path:
        """Where it belongs: another place for other requirements, and for another Python."""
        seed = [
            self.lock.read_text(encoding="utf-8"),
            sys.base_prefix,
            sys.version,
            sys.platform,
            platform.machine(),
        ]
        key = hashlib.sha256("\n".join(seed).encode()).hexdigest()[:12]
        return data.cache_folder() / "environments" / f"{self.name}-{key}"

    @property
    def is_built(self) -> bool:
        """Whether it is there, whole, and its Python has not been removed from under it."""
        return (self.folder / ".ready").is_file() and (self.folder / "bin" / "python").exists()

    def build(self) -> Path:
        """Make it where it is not there yet, and return its folder; two that come at once make it once.

        Progress is said on standard error, so that a command's output stays what it is.

        Raises:
            EnvironmentFailed: if a step fails, as it does without a network; the message has the end of its log.
        """
        folder = self.folder
        if self.is_built:
            return folder
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _only_one_at_a_time(folder.with_suffix(".lock"), self.title):
                if not self.is_built:  # another has made it, which this one waited for
                    self._make(folder, folder.with_suffix(".log"))
        except OSError as error:
            raise EnvironmentFailed(
                f"{self.title} cannot have its environment in {folder}: {error.strerror or error}; "
                "name another cache folder in WORKSHOP_CACHE"
            ) from None
        return folder

    def _make(self, folder: Path, log: Path) -> None:
        _say(f"{self.title}: installing its packages in an environment of their own, once, in {folder}")
        start = time.monotonic()
        log.write_text("")
        venv = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)]
        try:
            run_logged(venv, log, label=f"{self.title}: environment", env=_outside_of_packages(), report=_say)
            packages.install(
                folder / "bin" / "python",
                ["--no-deps", "--requirement", str(self.lock)],
                log,
                pip=Path(sys.executable),
                label=f"{self.title}: packages",
                report=_say,
            )
            (folder / ".ready").touch()
        except CommandFailed as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise EnvironmentFailed(
                f"the environment of {self.title} could not be made from {self.lock}. {error}\n"
                "  Its packages are downloaded: is there a network, and does pip reach its index?"
            ) from None
        except BaseException:  # an interrupt, mostly
            shutil.rmtree(folder, ignore_errors=True)
            raise
        _say(f"{self.title}: its environment is there, after {duration(time.monotonic() - start)}")

    def program(self, name: str) -> Path:
        """The program called so, such as `python`. Raises EnvironmentFailed where the environment has none."""
        found = self.build() / "bin" / name
        if not found.exists():
            raise EnvironmentFailed(f"the environment of {self.title} has no program {name!r}")
        return found

    def variables(self, **added: str) -> dict[str, str]:
        """This process's variables for a program in it, with `added`.

        Its own programs come first on the PATH, then those of the environment that calls it (such as torchrun).
        What would lead its Python to somebody else's modules is left out.
        """
        programs = [
            str(self.folder / "bin"),
            sysconfig.get_path("scripts"),
            os.environ.get("PATH", os.defpath),
        ]
        return _outside_of_packages() | {"PATH": os.pathsep.join(programs)} | added

    def run(
        self,
        program: str,
        *arguments: str,
        timeout_seconds: float | None = None,
        variables: Mapping[str, str] | None = None,
        folder: Path | None = None,
        text: str | None = None,
    ) -> str:
        """What a short command in it prints on standard output; `text` is what it reads from standard input.

        A long one, whose processes must end with it, is a `processes.group.Process` with `program` and `variables`.

        Raises:
            EnvironmentFailed: if it cannot be made, or the command ends with another code than 0, or takes longer.
        """
        command = [str(self.program(program)), *arguments]
        try:
            answer = subprocess.run(
                command,
                input=text if text is not None else "",
                capture_output=True,
                text=True,
                errors="replace",
                env=self.variables(**(variables or {})),
                cwd=folder,
                timeout=timeout_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise EnvironmentFailed(f"{program} did not end within {timeout_seconds:g} s") from None
        if answer.returncode != 0:
            said = (answer.stderr.strip() or answer.stdout.strip() or "it printed nothing").splitlines()
            last = "\n  ".join(said[-LAST_LINES:])
            raise EnvironmentFailed(
                f"{' '.join([program, *arguments[:2]])} ended with code {answer.returncode}:\n  {last}"
            )
        return answer.stdout


def _outside_of_packages() -> dict[str, str]:
    """This process's variables but for those that lead a Python to other modules than its own."""
    own = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"}
    return {name: value for name, value in os.environ.items() if name not in own}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _only_one_at_a_time(file: Path, title: str) -> Iterator[None]:
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"{title}: its environment is being made by another process: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
