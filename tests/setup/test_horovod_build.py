"""The build of Horovod, with real pip, wheels, locks and signals; only the source is a tiny one of that name."""

import io
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tarfile
from hashlib import sha256
from pathlib import Path

import pytest

from workshop_utils.setup import horovod_build

pytestmark = pytest.mark.processes

SECONDS = 120.0
UV = str(Path(sys.executable).with_name("uv"))
PACKAGES = sysconfig.get_path("purelib")

# TINY says what happens while a wheel is built; pip asks the same script for names before that.
SETUP = """
import os, pathlib, subprocess, sys
from setuptools import setup
if "bdist_wheel" in sys.argv:
    print("[ 42%] Building", flush=True)
    what = os.environ.get("TINY", "")
    if what == "fail":
        sys.exit("x.cc:3: error: no such header")
    if what:
        compiler = subprocess.Popen(["sleep", "1000"])
        pathlib.Path(what).write_text(str(compiler.pid))
        compiler.wait()
setup(name="horovod", version="0.28.1", packages=["horovod"])
"""
MODULE = "gloo_built = lambda: {gloo}\nmpi_built = lambda: True\n"
PROGRAM = """
import sys
from workshop_utils.setup import horovod_build
horovod_build.SDIST_SHA256 = sys.argv[1]
print({expression})
"""


class Machine:
    """A virtual environment that sees this one's packages, and a cache that holds the tiny source."""

    def __init__(self, folder, venv):
        self.python = venv / "bin" / "python"
        self.cache = folder / "c++ [mine]"  # as a user may call it, and CMake would misread it
        self.put_source()

    def put_source(self, gloo=True):
        """Puts the source into the cache; without `gloo`, it is one that builds and is not what was wanted."""
        files = {edit.path: edit.old for edit in horovod_build.SOURCE_EDITS}
        files |= {"setup.py": SETUP, "horovod/__init__.py": ""}
        files |= {f"horovod/{name}.py": MODULE.format(gloo=gloo) for name in ("tensorflow", "torch")}
        sdist = self.cache / "horovod" / horovod_build.SDIST_NAME
        sdist.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(sdist, "w:gz") as archive:
            for name, text in files.items():
                member = tarfile.TarInfo(f"horovod-0.28.1/{name}")
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
        self.digest = sha256(sdist.read_bytes()).hexdigest()

    def start(self, expression="horovod_build.main()", **variables):
        command = [str(self.python), "-c", PROGRAM.format(expression=expression), self.digest]
        environment = {**os.environ, "WORKSHOP_CACHE": str(self.cache), **variables}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env=environment, text=True, **pipes)

    def run(self, expression="horovod_build.main()", **variables):
        return self.start(expression, **variables).communicate(timeout=SECONDS)

    def wheels(self):
        return list(self.cache.rglob("*.whl"))


@pytest.fixture
def machine(tmp_path):
    venv = tmp_path / "venv"
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, str(venv)], check=True)
    (own,) = venv.glob("lib/python*/site-packages")
    (own / "seen.pth").write_text(f"{PACKAGES}\n{Path(__file__).parents[2]}\n")
    return Machine(tmp_path, venv)


def test_a_wheel_is_built_once_kept_and_not_taken_for_other_frameworks(machine):
    out, err = machine.run()
    assert (out, "Horovod 0.28.1 is installed (openmpi" in err) == ("0\n", True), err
    (wheel,) = machine.wheels()
    assert machine.run("horovod_build.has_horovod()")[0] == "True\n"
    subprocess.run([machine.python, "-m", "pip", "uninstall", "-qy", "horovod"], check=True)
    out, err = machine.run(TINY="fail")
    assert (out, f"was built before: installing and trying {wheel}" in err) == ("0\n", True), err
    assert machine.run("horovod_build.has_horovod()")[0] == "True\n"
    (own,) = machine.python.parents[1].glob("lib/python*/site-packages")
    (own / "torch-1.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n"
    (own / "torch-1.0.dist-info" / "METADATA").write_text(metadata)
    assert machine.run("horovod_build.has_horovod()")[0] == "False\n"


def test_a_build_that_fails_or_is_not_what_was_wanted_is_explained_and_neither_kept_nor_installed(
    machine, tmp_path
):
    out, err = machine.run(TINY="fail", TMPDIR=str(tmp_path / "venv"))
    assert out == "1\n"
    assert re.search(r"Horovod is not installed\. .*compiling failed\. The full log is .*build\.log", err)
    assert "error: no such header" in err
    assert len(err.splitlines()) < 30
    assert (machine.wheels(), list((tmp_path / "venv").glob("horovod-*"))) == ([], [])
    machine.put_source(gloo=False)
    out, err = machine.run()
    assert (out, "Gloo and MPI, each for TensorFlow and PyTorch" in err) == ("1\n", True), err
    assert machine.wheels() == []
    assert machine.run("horovod_build.has_horovod()")[0] == "False\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_build_ends_its_compilers_and_another_that_waits_goes_on(
    number, machine, tmp_path, watch
):
    compiler = tmp_path / "compiler"
    first = machine.start(TINY=str(compiler), TMPDIR=str(tmp_path))
    assert watch.eventually(lambda: compiler.exists() and compiler.read_text(), SECONDS)
    progress = machine.run("horovod_build.in_progress()")[0]
    assert re.fullmatch(r"Horovod is being compiled: 42 %, .* so far\n", progress)
    second = machine.start()
    assert "is being built by another process: waiting for it" in second.stderr.readline()
    first.send_signal(number)
    first.communicate(timeout=SECONDS)
    assert watch.eventually(lambda: not watch.alive(int(compiler.read_text())), SECONDS)
    assert second.communicate(timeout=SECONDS)[0] == "0\n"
    assert len(machine.wheels()) == 1
    assert machine.run("horovod_build.in_progress()")[0] == "None\n"
