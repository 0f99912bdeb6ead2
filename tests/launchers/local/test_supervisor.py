"""The supervisor itself: groups of small processes, and the events that it tells."""

import io
import os
import platform
import signal
import subprocess
import sys
import tarfile
import time

import psutil
import pytest
from conftest import alive, eventually, marked_processes

from workshop_utils.launchers.local.environment import scratch_folder
from workshop_utils.launchers.local.run import Event, Process, ProcessGroup

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("nothing_is_left")]


def python(name, script, **fields):
    """A process that runs `script` with nothing but the standard library."""
    command = (sys.executable, "-S", "-c", f"import os, signal, sys, time\n{script}")
    return Process(name, command, dict(os.environ), "/", **fields)


class Group(ProcessGroup):
    """A group that keeps what it is told."""

    def __init__(self, *processes, timeout_seconds=60, scratch=None, files=(), **more):
        self.events: list[Event] = []
        scratch = scratch or scratch_folder()
        super().__init__(processes, self.events.append, timeout_seconds, scratch, dict(files), **more)

    @property
    def ended(self):
        return self.events[-1] if self.events and self.events[-1]["event"] == "ended" else None

    def end(self):
        """Wait for the end; the last event."""
        assert eventually(lambda: self.ended), self.events
        return self.ended

    def said(self, name):
        lines = [event for event in self.events if event["event"] == "lines" and event["name"] == name]
        return [text for event in lines for text in event["texts"]]

    def pid(self, name):
        def started():
            return [e["pid"] for e in self.events if e["event"] == "started" and e["name"] == name]

        assert eventually(started)
        return started()[0]


def test_a_service_that_fails_fails_the_group():
    group = Group(python("chief", "time.sleep(1000)"), python("service", "sys.exit(7)", required=False))
    assert group.end() == {"event": "ended", "outcome": "failed", "name": "service", "code": 7}


def test_of_two_that_end_badly_at_once_the_one_that_was_killed_is_blamed():
    group = Group(python("slow", "time.sleep(1000)"), python("killed", "time.sleep(1000)"))
    supervisor = psutil.Process(group.pid("slow")).ppid()
    killed, slow = group.pid("killed"), group.pid("slow")
    os.kill(supervisor, signal.SIGSTOP)  # so that it hears of both ends at the same time
    os.kill(slow, signal.SIGHUP)
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: not alive(slow) and not alive(killed))
    os.kill(supervisor, signal.SIGCONT)
    ended = group.end()
    assert (ended["name"], ended["code"]) == ("killed", -signal.SIGKILL)


def test_a_command_that_does_not_exist_is_named():
    group = Group(Process("one", ("/no/such/program",), {}, "/"))
    assert group.end() == {"event": "ended", "outcome": "failed", "name": "one", "code": 127}
    assert group.said("one") == ["/no/such/program cannot be started in /: No such file or directory"]


def test_a_scratch_folder_holds_its_files_and_archives_and_is_for_its_owner_alone(nothing_is_left):
    scratch, content = nothing_is_left / "workshop-scratch", io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as file:
        entry = tarfile.TarInfo("c/d.bin")
        entry.size, entry.mode = 2, 0o755
        file.addfile(entry, io.BytesIO(b"\xff\0"))
    script = f"""
os.chdir({str(scratch)!r})
print(open("a/b.txt").read(), open("a/c/d.bin", "rb").read(), os.access("a/c/d.bin", os.X_OK))
print(oct(os.stat(".").st_mode)[-3:])
"""
    files, archives = {"a/b.txt": "hällo"}, {"a": content.getvalue()}
    group = Group(python("one", script), scratch=scratch, files=files, archives=archives)
    group.end()
    assert group.said("one") == ["hällo b'\\xff\\x00' True", "700"]
    assert not scratch.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_supervisor_that_is_told_to_end_ends_the_group(number):
    group = Group(python("one", "time.sleep(1000)"))
    os.kill(psutil.Process(group.pid("one")).ppid(), number)
    assert group.end() == {"event": "ended", "outcome": "stopped"}


def test_a_group_that_is_stopped_while_it_starts_ends_by_sigterm_and_needs_no_sigkill():
    for _ in range(10):
        group = Group(*(python(name, "time.sleep(1000)") for name in "abcd"))
        group.stop()
        assert group.end()["outcome"] == "stopped"
        codes = {event["code"] for event in group.events if event["event"] == "exited"}
        assert codes == {-signal.SIGTERM}


def test_a_process_that_stands_still_may_clean_up_when_it_is_told_to_end():
    group = Group(
        python(
            "one",
            "signal.signal(signal.SIGTERM, lambda *_: (print('cleaned up'), sys.exit(0)))\n"
            "print('ready', flush=True)\n"
            "time.sleep(1000)",
        )
    )
    assert eventually(lambda: group.said("one"))
    os.kill(group.pid("one"), signal.SIGSTOP)
    group.stop()
    group.end()
    assert group.said("one") == ["ready", "cleaned up"]


def test_processes_are_in_sessions_of_their_own_with_nothing_to_read_and_signals_as_usual():
    script = """
print(os.getsid(0) == os.getpid(), repr(sys.stdin.read()), sorted(map(int, os.listdir("/proc/self/fd")))[:4])
print([str(signal.getsignal(getattr(signal, n))) for n in ("SIGTERM", "SIGHUP", "SIGCHLD", "SIGPIPE")])
print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""
    direct = subprocess.run(
        [sys.executable, "-S", "-c", "import os, signal, sys\n" + script],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, start_new_session=True,
    )  # fmt: skip
    group = Group(python("one", script), python("two", script))
    group.end()
    assert group.said("one") == group.said("two") == direct.stdout.splitlines()


def test_an_owner_that_has_died_before_the_start_is_noticed(nothing_is_left):
    script = f"""
import os, sys
from workshop_utils.launchers.local.run import Process, ProcessGroup
from pathlib import Path
scratch = Path({str(nothing_is_left / "workshop-x")!r})
ProcessGroup([Process("one", ("sleep", "1000"), dict(os.environ), "/")], print, 60, scratch, {{}})
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    assert eventually(lambda: not marked_processes())
    assert eventually(lambda: not (nothing_is_left / "workshop-x").exists())


def test_a_process_whose_first_thread_has_ended_is_not_forgotten():
    number = 60 if platform.machine() == "x86_64" else 93  # of the system call `exit`
    script = (
        "import threading, ctypes\n"
        "def last():\n"
        "    while True: time.sleep(1)\n"
        "threading.Thread(target=last).start()\n"
        "print('ready', flush=True)\n"
        f"ctypes.CDLL(None).syscall({number}, 0)"  # this thread alone; the process stays, as a zombie
    )
    group = Group(python("one", script))
    assert eventually(lambda: any(event["event"] == "lines" for event in group.events))
    (pid,) = [event["pid"] for event in group.events if event["event"] == "started"]
    assert eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    group.stop()
    assert group.end()["outcome"] == "stopped"
    assert not psutil.pid_exists(pid)


# Prompts


ANSWERS = """
import socket
supervisor = socket.socket(fileno=0)
signal.signal(signal.SIGUSR1, lambda *_: supervisor.send(b"!"))
print("ready", flush=True)
while supervisor.recv(100):
    supervisor.send(b"!")
"""


def of_kind(group, kind):
    return [event for event in group.events if event["event"] == kind]


def test_processes_that_have_answered_in_time_have_the_idle_seconds_for_the_next_prompt():
    group = Group(python("one", ANSWERS), python("two", ANSWERS), idle_seconds=0.1)
    assert eventually(lambda: group.said("one") == group.said("two") == ["ready"])
    group.order(60, "prompt")
    assert group.end()["outcome"] == "timeout"
    assert [event["name"] for event in of_kind(group, "done")] in (["one", "two"], ["two", "one"])
    assert [event["is_idle"] for event in of_kind(group, "silent")] == [True]


def test_an_answer_after_the_time_limit_does_not_count():
    group = Group(python("one", ANSWERS), idle_seconds=60)
    assert eventually(lambda: group.said("one"))
    group.order(0.0)
    assert eventually(lambda: of_kind(group, "silent"))
    os.kill(group.pid("one"), signal.SIGUSR1)
    os.kill(of_kind(group, "silent")[0]["supervisor"], signal.SIGUSR2)
    assert group.end()["outcome"] == "timeout"
    assert not of_kind(group, "done")


def test_a_time_limit_that_is_over_stays_so_if_answers_come_at_the_same_moment():
    group = Group(python("one", ANSWERS), idle_seconds=60)
    assert eventually(lambda: group.said("one"))
    supervisor = psutil.Process(group.pid("one")).ppid()
    os.kill(supervisor, signal.SIGSTOP)
    group.order(0.0)
    os.kill(group.pid("one"), signal.SIGUSR1)
    time.sleep(0.2)  # for the answer
    os.kill(supervisor, signal.SIGCONT)
    assert group.end()["outcome"] == "timeout"
    assert not of_kind(group, "done")


def test_a_process_that_is_to_stay_ends_the_group_however_it_ends():
    group = Group(python("one", ANSWERS), python("two", "sys.exit(0)"), idle_seconds=60)
    assert group.end() == {"event": "ended", "outcome": "failed", "name": "two", "code": 0}


def test_a_service_of_processes_that_stay_need_not_answer():
    service = python("service", "time.sleep(1000)", required=False)
    group = Group(service, python("one", ANSWERS), idle_seconds=0.1)
    assert eventually(lambda: group.said("one"))
    group.order(60, "prompt")
    assert group.end()["outcome"] == "timeout"
    assert [event["is_idle"] for event in of_kind(group, "silent")] == [True]
