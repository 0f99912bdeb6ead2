"""What a lesson needs arrives while the lesson goes on; what needs it waits, and everything ends with the kernel."""

import contextlib
import os
import subprocess
import sys
import textwrap

import psutil
import pytest
from conftest import eventually

from workshop_utils import optional
from workshop_utils.jobs import JobError
from workshop_utils.launchers.local import Local
from workshop_utils.setup import install

SECONDS = 60.0

# A kernel in an environment of the workshop's own, which lacks a package; a script takes the installer's place.
KERNEL = """
import sys
from importlib.util import find_spec
from workshop_utils import optional
from workshop_utils.setup import install

optional.MODULES["greeting"] = ("greetings",)
install.is_own_environment = lambda: {own}
sys.executable = sys.argv[1]
sys.path.append(".")
finders = list(sys.meta_path)
try:
    install.need("greeting")
    install.need("greeting")  # as in a cell that is run again
    print("going on, without", find_spec("greetings"), flush=True)
    optional.require("greeting")
    import greetings
    print(greetings.TEXT, sys.meta_path == finders)
except optional.MissingPackage as error:
    print("MissingPackage:", error)
"""
INSTALLER = """#!/bin/bash
test ! -e called || echo again
echo "$@" > called
until test -e go; do sleep 0.02; done
{ending}
"""
# The installer's own program, whose long part is a process that sleeps.
BUSY = """
import subprocess, sys
from workshop_utils.setup import install
def busy(extras, in_background):
    subprocess.run(["sleep", "1000"])
install.install = busy
sys.exit(install.main({parent}, ["mpi"]))
"""


@pytest.fixture
def kernel(tmp_path):
    """Starts the kernel above, with an installer that ends so."""

    def start(ending, own=True):
        script = tmp_path / "python"
        script.write_text(INSTALLER.format(ending=ending))
        script.chmod(0o755)
        return subprocess.Popen(
            [sys.executable, "-c", KERNEL.format(own=own), str(script)], cwd=tmp_path, text=True,
            env=os.environ | {"WORKSHOP_CACHE": str(tmp_path / "cache")}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip

    return start


@pytest.mark.processes
def test_an_import_waits_for_what_is_being_installed_and_shows_it(kernel, tmp_path):
    with kernel("echo 'TEXT = 5' > greetings.py") as process:
        for _ in range(2):
            assert process.stdout.readline().startswith("Installing greeting in the background.")
        assert process.stdout.readline() == "going on, without None\n"  # a question is answered at once
        called = tmp_path / "called"
        assert eventually(lambda: called.exists() and called.read_text().endswith("\n"), SECONDS)
        assert called.read_text().split()[-2:] == [str(process.pid), "greeting"]
        (tmp_path / "go").touch()
        told = process.stdout.read()
    assert "The cell goes on when that is finished." in told
    assert told.splitlines()[-1] == "5 True"  # nothing stays behind in the import system


@pytest.mark.processes
def test_an_installation_that_fails_is_told_where_the_package_is_imported(kernel, tmp_path):
    (tmp_path / "go").touch()
    with kernel("yes 'no network' | head -20000 >&2; exit 1") as process:  # more than a pipe holds
        told = process.stdout.read()
    assert told.splitlines()[-1] == "no network"
    assert "MissingPackage: greetings could not be installed. no network" in told


@pytest.mark.processes
def test_somebody_elses_environment_is_not_changed_and_the_command_is_named(kernel, tmp_path):
    with kernel("", own=False) as process:
        told = process.stdout.read()
    command = "`workshop install greeting` installs it"
    assert told == f"MissingPackage: greetings not installed: {command}\n"
    assert not (tmp_path / "called").exists()


@pytest.mark.processes
def test_the_installer_has_the_lowest_priority_and_ends_with_the_kernel(watch):
    inner = BUSY.replace("{parent}", "int(sys.argv[1])")
    outer = f"""
        import os, subprocess, sys, time
        subprocess.Popen([sys.executable, "-c", {inner!r}, str(os.getpid())])
        time.sleep(1000)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(outer)]) as parent:
        installer = psutil.Process(parent.pid)
        assert eventually(lambda: len(installer.children(recursive=True)) == 2, SECONDS)
        family = installer.children(recursive=True)
        assert eventually(lambda: all(process.nice() == 19 for process in family), SECONDS)
        parent.kill()
    assert eventually(lambda: not any(watch.alive(process.pid) for process in family[:1]), SECONDS)


@pytest.mark.parametrize("extra", ["tensorflo", ""])
def test_an_extra_that_does_not_exist_is_refused_with_the_names_of_all(extra):
    with pytest.raises(
        install.SetupError, match=f"EXTRA is '{extra}'; it must be one of torch, .*spark, all"
    ):
        install.install(["torch", extra])


def test_what_an_interrupted_installation_left_counts_as_missing(monkeypatch, tmp_path):
    assert optional.missing("lessons") == []
    monkeypatch.setattr(optional, "UNFINISHED", tmp_path / "unfinished")
    optional.UNFINISHED.write_text("spark lessons")
    assert optional.missing("lessons") == [*optional.MODULES["lessons"]]


@pytest.mark.parametrize("fails", [True, False])
def test_an_installation_marks_what_it_brings_and_nothing_that_was_there(fails, monkeypatch, tmp_path):
    def run_uv(*_arguments, **_variables):
        assert optional.missing("mpi", "lessons") == ["mpi4py"]
        if fails:
            raise install.SetupError("no network")

    monkeypatch.setenv("WORKSHOP_CACHE", str(tmp_path))
    monkeypatch.setattr(optional, "UNFINISHED", tmp_path / "unfinished")
    monkeypatch.setattr(optional, "is_installed", lambda module: module != "mpi4py")
    monkeypatch.setattr(install, "run_uv", run_uv)
    with contextlib.suppress(install.SetupError):
        install.install(["mpi", "lessons"])
    assert optional.UNFINISHED.exists() == fails
    assert optional.missing("torch", "lessons", "tensorflow") == []


def test_a_folder_that_happens_to_have_the_name_of_a_package_is_none(monkeypatch, tmp_path):
    (tmp_path / "horovod_of_mine").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not optional.is_installed("horovod_of_mine")


# Jobs


@pytest.mark.processes
def test_a_job_waits_for_a_package_that_its_script_imports(make_job, monkeypatch, capsys):
    steps = iter(["Installing spark: 1 s so far", "Installing spark: 2 s so far", None])
    monkeypatch.setattr(install, "in_progress", lambda: next(steps, None))
    monkeypatch.setitem(optional.EXTRAS, "no_such_module", "spark")
    run = Local().launch(make_job("print('on')\nif False:\n    import no_such_module")).wait(SECONDS)
    assert [line.text for line in run.logs()] == ["on"]
    told = capsys.readouterr().out
    assert "Installing spark: 2 s so far. The job starts when that is finished." in told
    assert told.rstrip().endswith("The installation has ended.")


@pytest.mark.processes
def test_without_its_framework_a_strategy_is_refused_and_other_jobs_do_as_they_like(make_job, monkeypatch):
    from workshop_utils.launchers.local import environment

    monkeypatch.setattr(environment, "find_spec", lambda _: None)
    careful = """
        try:
            import horovod.nothing_of_this_name
        except ImportError:
            print("without")
    """
    run = Local().launch(make_job(careful)).wait(SECONDS)
    assert [line.text for line in run.logs()] == ["without"]
    with pytest.raises(JobError, match="'horovod', but horovod is not installed; `workshop install horovod`"):
        Local().launch(make_job("import horovod.torch", strategy="horovod", workers=2))
