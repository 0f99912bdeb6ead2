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
PACKAGES = Path(sysconfig.get_path("purelib"))

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
local = os.environ.get("HOROVOD_LOCAL_VERSION")
setup(name="horovod", version=f"0.28.1+{local}" if local else "0.28.1", packages=["horovod"])
"""
MODULE = "gloo_built = lambda: {gloo}\nmpi_built = lambda: {mpi}\n"
PATCH = "".join(f"""
--- a/horovod/{name}.py
+++ b/horovod/{name}.py
@@ -2 +2 @@
-mpi_built = lambda: False
+mpi_built = lambda: True
""" for name in ("tensorflow", "torch"))  # fmt: skip
PROGRAM = """
import sys
from pathlib import Path
from workshop_utils.setup import horovod_build
horovod_build.SCRIPT = Path(sys.argv[1])
print({expression})
"""


class Machine:
    """A virtual environment that sees this one's packages but Horovod, a cache, and an index with the tiny source."""

    def __init__(self, folder):
        self.prefix, self.index = folder / "venv", folder / "index"
        subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, str(self.prefix)], check=True)
        (self.packages,) = self.prefix.glob("lib/python*/site-packages")
        seen = folder / "seen"
        seen.mkdir()
        for path in PACKAGES.iterdir():
            if not path.name.startswith("horovod"):
                (seen / path.name).symlink_to(path)
        (self.packages / "seen.pth").write_text(f"{seen}\n{Path(__file__).parents[2]}\n")
        self.python = self.prefix / "bin" / "python"
        self.cache = folder / "c++ [mine]"  # as a user may call it, and CMake would misread it
        self.script = folder / "horovod_build.sh"
        self.put_source()

    def put_source(self, gloo=True, mpi=False):
        """Puts the source into the index. It builds without `gloo` or `mpi`; the patch gives it `mpi`."""
        files = {"setup.py": SETUP, "horovod/__init__.py": ""}
        files |= {f"horovod/{name}.py": MODULE.format(gloo=gloo, mpi=mpi) for name in ("tensorflow", "torch")}
        sdist = self.index / "horovod-0.28.1.tar.gz"
        self.index.mkdir(exist_ok=True)
        with tarfile.open(sdist, "w:gz") as archive:
            for name, text in files.items():
                member = tarfile.TarInfo(f"horovod-0.28.1/{name}")
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
        digest = sha256(sdist.read_bytes()).hexdigest()
        script = horovod_build.SCRIPT.read_text()
        self.script.write_text(re.sub("sha256:[0-9a-f]{64}", f"sha256:{digest}", script))
        self.script.with_name("horovod-0.28.1.patch").write_text(PATCH)

    def start(self, expression="horovod_build.main()", **variables):
        command = [str(self.python), "-c", PROGRAM.format(expression=expression), str(self.script)]
        index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.index)}
        environment = {**os.environ, **index, "WORKSHOP_CACHE": str(self.cache), **variables}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env=environment, text=True, **pipes)

    def run(self, expression="horovod_build.main()", **variables):
        return self.start(expression, **variables).communicate(timeout=SECONDS)

    def has_horovod(self):
        return self.run("horovod_build.has_horovod()")[0] == "True\n"

    def installed(self):
        return sorted(path.name for path in self.packages.glob("horovod*"))

    def uninstall(self):
        subprocess.run([self.python, "-m", "pip", "uninstall", "-qy", "horovod"], check=True)

    def wheels(self):
        return list(self.cache.rglob("*.whl"))


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_a_wheel_is_built_once_kept_and_not_taken_for_other_frameworks(machine):
    assert machine.run("horovod_build.installed_recipe()")[0] == "None\n"
    out, err = machine.run()
    assert (out, "Horovod is installed" in err) == ("0\n", True), err
    (wheel,) = machine.wheels()
    assert machine.has_horovod()
    machine.uninstall()
    out, err = machine.run(TINY="fail")
    assert (out, f"installing {wheel}" in err) == ("0\n", True), err
    assert machine.has_horovod()
    for module in machine.packages.glob("horovod/t*.py"):
        module.unlink()
    assert machine.run(TINY="fail")[0] == "0\n"  # one that is installed and cannot be imported is replaced
    assert len(list(machine.packages.glob("horovod/t*.py"))) == 2
    (machine.packages / "torch-1.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n"
    (machine.packages / "torch-1.0.dist-info" / "METADATA").write_text(metadata)
    assert not machine.has_horovod()
    assert machine.run(TINY="fail")[0] == "1\n"  # what is kept is for another PyTorch


def test_a_build_that_fails_or_is_not_what_was_wanted_is_explained_and_neither_kept_nor_installed(
    machine, tmp_path
):
    out, err = machine.run(TINY="fail", TMPDIR=str(tmp_path / "venv"))
    assert out == "1\n"
    assert re.search(r"Horovod was not installed\. .*compiling failed\. The full log is .*build\.log", err)
    assert "error: no such header" in err
    assert len(err.splitlines()) < 30
    assert (machine.wheels(), list(machine.prefix.rglob("horovod-*"))) == ([], [])
    machine.put_source(gloo=False)
    out, err = machine.run()
    assert (out, "Gloo and MPI, each for TensorFlow and PyTorch" in err) == ("1\n", True), err
    assert (machine.wheels(), list(machine.prefix.rglob("horovod-*"))) == ([], [])
    assert not machine.has_horovod()


def test_a_horovod_that_does_not_say_what_it_was_built_for_is_left_as_it_is(machine):
    machine.put_source(mpi=True)
    command = [machine.python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, machine.index / "horovod-0.28.1.tar.gz"], check=True)
    assert machine.has_horovod()
    assert machine.run(TINY="fail")[0] == "0\n"
    assert "horovod-0.28.1.dist-info" in machine.installed()


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
    if number != signal.SIGKILL:
        assert list(tmp_path.glob("horovod-*/")) == []
    assert second.communicate(timeout=SECONDS)[0] == "0\n"
    assert len(machine.wheels()) == 1
    assert machine.run("horovod_build.in_progress()")[0] == "None\n"
