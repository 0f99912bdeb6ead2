"""A class's notebooks are run one by one, and nothing that they do reaches the next one or stays behind."""

import functools
import tempfile
from pathlib import Path

import nbformat
import pytest

from workshop_utils.jobs import JobError
from workshop_utils.lessons import editions, grading

LESSON = "07_wheels.ipynb"
STUBS = [f"answer{number} = ...\nchecks.wheels(answer{number})" for number in range(4)]
OPEN = "predicted, measured, why = ..., ..., ...\nchecks.spokes(predicted, measured, why)"

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("nothing_is_left")]


def lesson(answers=(*STUBS, OPEN)):
    new, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    start = (
        "import os, pathlib, time\n"
        "from types import SimpleNamespace\n"
        "from workshop_utils.lessons import checks as package\n"
        "from workshop_utils.lessons.checks.open_question import OpenQuestion\n"
        "@package.exercise\n"
        "def wheels(answer):\n"
        "    package.expect(answer, 4, 'your answer', 'two axles')\n"
        "    return '4 wheels: two axles.'\n"
        "checks = SimpleNamespace(\n"
        "    wheels=wheels,\n"
        "    spokes=OpenQuestion('spokes', 'A spoke carries little.', (20, 40)),\n"
        ")"
    )
    cells = [new("# 07 · Wheels", id="first"), code(start, id="start")]
    for number, answer in enumerate(answers):
        cells.append(code(answer, id=f"stub{number}", metadata={"tags": ["exercise"]}))
        if number == 1:
            cells.append(code("assert answer1 in (4, ...)  # the lesson goes on with the answer", id="uses"))
        cells.append(code(f"answer{number} = 4", id=f"solved{number}", metadata={"tags": ["solution"]}))
    return nbformat.v4.new_notebook(cells=cells)


@pytest.fixture
def tmp_path():
    """A folder outside that of temporary files, of which the sandbox shows nothing in any case."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        yield Path(name)


@pytest.fixture
def hand_in(tmp_path, monkeypatch):
    """Call with a learner's name and answers to put their notebook into handed_in/."""
    monkeypatch.chdir(tmp_path)
    for folder in ("notebooks", *editions.BESIDE):
        (tmp_path / folder).mkdir()
    nbformat.write(lesson(), str(tmp_path / "notebooks" / LESSON))

    def put(learner, answers, *added):
        folder = tmp_path / "handed_in" / learner
        folder.mkdir(parents=True)
        notebook = lesson(answers)
        notebook.cells[2:2] = added
        nbformat.write(notebook, str(folder / LESSON))

    return put


def has_sandbox():
    try:
        with tempfile.TemporaryDirectory() as root:
            Path(root).chmod(0o777)
            grading.sandbox(Path(root), [Path.home()])
    except JobError:
        return False
    return True


SANDBOXED = has_sandbox()


def grade(tmp_path, is_sandboxed=SANDBOXED, **options):
    grades = grading.grade_class(
        tmp_path / "handed_in", tmp_path / "out", is_sandboxed=is_sandboxed, **options
    )
    return [row for rows in grades for row in rows]


def test_each_answer_is_asked_by_the_lessons_own_check_away_from_credentials_and_jobs(
    hand_in, tmp_path, monkeypatch
):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    helper = nbformat.v4.new_code_cell(  # one that a learner added
        "four = 4\nassert 'AWS_SECRET_ACCESS_KEY' not in os.environ\n"
        "assert 'workshop-grade-' in os.environ['HOME']\npathlib.Path('../jobs/left').write_text('')",
        id="mine",
    )
    answers = [
        "answer0 = four\nchecks.wheels(answer0)",
        "answer1 = 3\n'Right: I say so'",  # a check that was changed does not count
        STUBS[2],
        "answer3 = 4 +",
        OPEN.replace("..., ..., ...", "30, 32, 'the rim would bend between spokes farther apart'"),
    ]
    hand_in("fay", answers, helper)
    (tmp_path / "handed_in/hal").mkdir()
    (tmp_path / "handed_in/hal" / LESSON).write_text("{ half")  # costs only its owner
    graded = grade(tmp_path)
    right, wrong, not_yet, failed, answered, unreadable = ((row["state"], row["verdict"]) for row in graded)
    assert right == ("right", "4 wheels: two axles.")
    assert wrong[0] == "wrong"
    assert "gave 3; it must be 4" in wrong[1]
    assert not_yet[0] == "not yet"
    assert failed == ("failed", "NameError: name 'answer3' is not defined")
    assert answered[0] == "answered"
    assert "the rim would bend" in answered[1]
    assert grading.summary(graded[:-1]) == "1 of 4 right, 1 answered for you to judge"
    assert grading.summary(graded[:4]) == "1 of 4 right"
    assert (graded[-1]["learner"], unreadable[0]) == ("hal", "unreadable")
    assert (tmp_path / "out/fay" / LESSON).is_file()
    assert not (tmp_path / "jobs/left").exists()
    table = grading.grades_table(graded)
    assert table.set_index("learner").loc["fay", ["exercises", "wrong", "answered"]].tolist() == [5, 1, 1]


def test_the_time_is_limited_and_nothing_that_a_learner_leaves_behind_is_run_or_followed(hand_in, tmp_path):
    (tmp_path / "secret").write_text("key")
    leave = f"""
import subprocess
subprocess.Popen(["setsid", "sleep", "1000"])
executed = pathlib.Path("../executed-{LESSON}")
executed.unlink()
executed.symlink_to({str(tmp_path / "secret")!r})
time.sleep(1000)"""
    hand_in("eve", [leave, *STUBS[1:]])
    row, *_ = grade(tmp_path, seconds=8)
    assert (row["state"], row["exercise"]) == ("not reached", "checks.wheels")
    assert "key" not in (tmp_path / "out/eve" / LESSON).read_text()


# Each is a program that ends with 0 where the sandbox does not hold. What hides and protects is mounted at /,
# /proc/sys, HIDDEN and OWN/.., and nothing may undo that, from other namespaces either.
ATTACKS = """
mount -o remount,rw,bind /
mount -o remount,rw / && touch /usr/written
mount --bind / OWN/home && mount -o remount,rw,bind OWN/home && touch OWN/home/usr/written
touch /usr/written
umount -l HIDDEN
umount -l HOME
umount -l /tmp
umount -l /proc/sys
mount -o remount,rw,bind /proc/sys
echo 1 > /proc/sys/vm/drop_caches
sysctl -w vm.drop_caches=1
mount -t proc proc OWN/home && echo 1 > OWN/home/sys/vm/drop_caches
unshare --pid --fork --mount-proc sh -c 'echo 1 > /proc/sys/vm/drop_caches'
unshare --user --map-root-user --mount sh -c 'umount -l HIDDEN || mount -o remount,rw,bind /'
echo h > /proc/sysrq-trigger
mount -t sysfs sysfs OWN/home && echo 0 > OWN/home/kernel/mm/ksm/run
mknod OWN/home/disk b DISK && head -c 1 OWN/home/disk
mknod /dev/disk b DISK
test -e /dev/sda -o -e /dev/vda -o -e /dev/loop0 -o -e /dev/kmsg
mount -t devtmpfs devtmpfs OWN/home
mount -t ext4 /dev/vda OWN/home
nsenter --target 1 --mount true
nsenter --target 1 --net true
setpriv --reuid=0 --clear-groups cat /etc/shadow
setpriv --reuid=1 true
ls /proc/1/root/
kill -9 1 && sleep 1 && test ! -e /proc/1
cat HIDDEN/handed_in/amy/LESSON
cat HIDDEN/out/amy/LESSON
cat HIDDEN/notebooks/LESSON
ls HIDDEN/handed_in/*
cat HOME/secret
touch HOME/secret && cat HOME/secret | grep key
echo > HIDDEN/handed_in/amy/LESSON
"""
FILES = """
import socket, subprocess
attacks = {attacks!r}.strip().splitlines()
held = [subprocess.run(attack, shell=True, capture_output=True).returncode != 0 for attack in attacks]
worked = [attack for attack, holds in zip(attacks, held) if not holds]
try:
    socket.create_connection(("192.0.2.1", 80), timeout=3)
    worked.append("network")
except OSError:
    pass
answer0 = worked or 4
checks.wheels(answer0)"""
LINKS = """
from workshop_utils import on_ranks
from workshop_utils.network import availability
def first(communicator):
    import numpy as np
    from workshop_utils.comm.ring import ring_all_reduce
    array = np.ones(4)
    ring_all_reduce(communicator, array)
    return float(array[0])
answer1 = sum(on_ranks(2, first, network="100Mbit").values)
assert availability() == "root"  # so that slow links are the kernel's
checks.wheels(answer1)"""


@pytest.mark.skipif(not SANDBOXED, reason="no bubblewrap here, or it may not make a sandbox")
def test_the_sandbox_holds_against_a_notebook_that_is_root_in_it(hand_in, tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    (home / "secret").write_text("key")
    monkeypatch.setenv("HOME", str(home))
    number = next(Path("/sys/block").glob("*/dev"), None)
    device = number.read_text().strip().replace(":", " ") if number else "7 0"
    words = {"HIDDEN": str(tmp_path), "HOME": str(home), "LESSON": LESSON, "DISK": device, "OWN": ".."}
    attacks = functools.reduce(lambda text, word: text.replace(word, words[word]), words, ATTACKS)
    hand_in("amy", STUBS)
    hand_in("eve", [FILES.format(attacks=attacks), LINKS, *STUBS[2:]])
    mounts = Path("/proc/self/mountinfo").read_text()
    graded = [row for row in grade(tmp_path) if row["learner"] == "eve"]
    assert not [row["verdict"] for row in graded[:2] if row["state"] != "right"]
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert not Path("/usr/written").exists()
    assert (home / "secret").read_text() == "key"


def test_without_bubblewrap_nothing_is_run_unless_the_instructor_says_so(hand_in, tmp_path, monkeypatch):
    hand_in("ida", STUBS)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JobError, match=r"apt-get install bubblewrap.*--no-sandbox"):
        grade(tmp_path, is_sandboxed=True)
    assert not list((tmp_path / "out").glob("*/*.ipynb"))
