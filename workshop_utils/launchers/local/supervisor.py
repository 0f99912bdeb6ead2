"""Owns the processes of one run: starts them, reports what they print and how they end, leaves none behind.

This is a program, run as `python -E -s -S supervisor.py` with the standard library alone, so that it is up in a few
hundredths of a second. It has one thread, so it may fork; the notebook that asks for a run may have many.

It reads one JSON line (the specification, see `run.ProcessGroup`), perhaps orders, each a JSON line with a new
`timeout_seconds` and a `prompt` for all processes (without one, the time limit holds whatever they answer), and the
words `stop` and `read`. It writes events as JSON lines:

    {"event": "started", "name": ..., "pid": ...}
    {"event": "lines", "name": ..., "stream": "stdout" | "stderr", "texts": [...]}  at least one
    {"event": "exited", "name": ..., "code": ..., "ours": ...}  a negative code is a signal, as in subprocess; ours:
                                                                whether that was sent here
    {"event": "done", "name": ...}      a process has answered the last prompt in time, and all that it had printed is
                                        reported
    {"event": "silent", "supervisor": ..., "is_idle": ...}  its process id, at the timeout; whether all had
                                            answered; the owner asks for stacks, and sends SIGUSR2 when it has them
    {"event": "read", "folder": ...}    where asked for: all have ended, and the folder stays until the owner answers
    {"event": "ended", "outcome": "succeeded" | "failed" | "stopped" | "timeout", "name": ..., "code": ...}
                                            with a "reason" where a process did not end by itself, or could not start

Three things make sure that nothing is left behind. The owner's end of the specification's pipe closes when the
owner dies, however it dies, and the supervisor then ends everything. The supervisor is a "subreaper" (prctl(2)):
what a rank leaves running becomes the supervisor's child, so it is found and ended too. And should the supervisor
itself be killed, each process that it started gets SIGKILL from the kernel (PR_SET_PDEATHSIG, prctl(2)).

Descriptors that it is given by number keep folders locked until all has ended.

With `--warm MODULE...` it imports the modules first and then serves: for descriptors that arrive together on its
standard input, a socket, it forks a supervisor whose ranks are forked as well, not executed: see
`warm_server`.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import select
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import job_script  # type: ignore[import-not-found]  # this is a program; its folder is on the path
import namespaces  # type: ignore[import-not-found]
import warm_server  # type: ignore[import-not-found]

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

GRACE_SECONDS = 2.0  # between SIGTERM and SIGKILL; a failed run must be gone within five seconds
DEATH_SECONDS = 0.2  # for a process that was killed to be gone
STACK_SECONDS = 10.0  # at most, for the owner to ask for stacks
# Open MPI may wait for ever when its ranks have ended; it is found so at several looks before it is ended.
LOOK_SECONDS, LOOKS = 1.0, 5
LINE_LIMIT = 1 << 20  # a longer line is reported in parts

# The folder of this program was on the path for the import above; what a warm server imports is not to see it.
sys.path[:] = [folder for folder in sys.path if folder != str(Path(__file__).parent)]

Script = Callable[[], None]


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


class Supervisor:
    """The processes of one run, from their start to the last one's end."""

    def __init__(self, fork: bool, control: int, events: int, *locks: int) -> None:
        self._control, self._events, self._fork = control, events, fork
        os.set_blocking(events, False)
        self._selector = selectors.PollSelector()  # without a descriptor: a fork has macOS's kqueue no more
        self._running: dict[int, str] = {}  # by process id
        self._streams: dict[
            int, tuple[str, str]
        ] = {}  # by descriptor: the process's name, and "stdout" or "stderr"
        self._unended: dict[int, bytes] = {}  # what has come of each one's next line
        self._required: set[str] = set()
        self._mpirun = 0  # its process id, once it has been started
        self._had_ranks = self._is_quiet = False
        self._owner: int | None = None  # a descriptor that is readable once the owner has died
        self._deadline = 0.0
        self._orders = b""  # what has come of the next one
        self._prompts: dict[int, str] = {}  # by the descriptor of its input, the process's name
        self._called: set[str] = set()  # the required processes that have not answered the last prompt
        self._idle_seconds = 0.0  # that processes, if they are prompted, may wait for one
        self._may_die: set[str] = set()  # processes that may be killed without failing the run
        self._told_to_stop = self._has_stacks = self._was_read = False
        self._sent: set[int] = set()  # the signals sent to all
        self._unheard = False  # the owner reads no more
        self._locks = locks  # descriptors that keep others out of the run's checkpoints
        self._held = [*locks]  # and descriptors that keep the processes' networks

    def run(self) -> Script | None:
        """Carry out one specification. In a forked rank, the script that it is to run; otherwise None."""
        specification = self._read_specification()
        if specification is None:
            return None
        scratch = specification["scratch"]
        wake, self._waker = os.pipe()
        for descriptor in (wake, self._waker):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGUSR2, self._heard_stacks)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._wake = wake
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(wake, selectors.EVENT_READ)
        self._watch_owner(specification["owner"])
        try:
            _write_files(Path(scratch), specification["files"], specification["archives"])
            if specification["network"]:
                self._make_switch(specification["network"])
            self._idle_seconds = specification["idle_seconds"]
            self._may_die = set(specification["may_die"])
            for process in specification["processes"]:
                script = self._start(process)
                if script is not None:
                    return script
        except OSError as error:
            ended = {"outcome": "failed", "name": "supervisor", "code": None}
            ended["reason"] = f"could not be started: {error}"
        else:
            self._deadline = time.monotonic() + specification["timeout_seconds"]
            self._called.update(self._required)
            self._obey(b"")  # what came with the specification
            ended = self._watch()
        self._end_everything()
        if specification["is_read"]:
            self._tell({"event": "read", "folder": scratch})
            while not (self._was_read or self._unheard):
                self._pump(60)
        shutil.rmtree(scratch, ignore_errors=True)
        for lock in self._locks:  # whoever hears of the end may start the next run
            fcntl.flock(lock, fcntl.LOCK_UN)
        self._tell({"event": "ended", **ended})
        return None

    def _stop(self, *_: object) -> None:
        self._told_to_stop = True

    def _heard_stacks(self, *_: object) -> None:
        self._has_stacks = True

    def _watch_owner(self, pid: int) -> None:
        # The pipe's end says it too, unless a child that the owner forked still holds the other end.
        try:
            self._owner = os.pidfd_open(pid)
        except ProcessLookupError:
            self._told_to_stop = True
        except (AttributeError, OSError):
            return  # not Linux, or an old one: the pipe must do
        else:
            self._selector.register(self._owner, selectors.EVENT_READ)

    def _read_specification(self) -> dict[str, Any] | None:
        chunks = [b""]
        while b"\n" not in chunks[-1]:
            chunks.append(os.read(self._control, 1 << 16))
            if not chunks[-1]:
                return None
        line, _, self._orders = b"".join(chunks).partition(b"\n")
        specification: dict[str, Any] = json.loads(line)
        return specification

    def _tell(self, event: dict[str, Any]) -> None:
        data = (json.dumps(event) + "\n").encode()
        while data and not self._unheard:
            try:
                data = data[os.write(self._events, data) :]
            except BlockingIOError:
                self._wait_for_listener()
            except BrokenPipeError:
                self._unheard = True

    def _wait_for_listener(self) -> None:
        """Wait until the owner has read some events, or has died while a child holds its pipe."""
        watched = [] if self._owner is None else [self._owner]
        died, _, _ = select.select(watched, [self._events], [])
        self._unheard = bool(died)

    # Starting

    def _make_switch(self, network: dict[str, Any]) -> None:
        if network["as_user"]:
            namespaces.leave_network_as_user()
        else:
            namespaces.leave_network()
        namespaces.carry_out(network["switch"])

    def _start(self, process: dict[str, Any]) -> Script | None:
        pipes = {"stdout": os.pipe(), "stderr": os.pipe()}
        # Not socket objects: a forked process's garbage collector would close their descriptors, which it uses anew.
        prompts = [each.detach() for each in socket.socketpair()] if self._idle_seconds else []
        supervisor = os.getpid()
        left, plugged = os.pipe(), os.pipe()  # "I have my own network", "your cable is in"
        # A stop that comes before the child is itself must wait until it can end it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        pid = os.fork()
        if pid == 0:
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != supervisor:  # it died before the line above, so the kernel will not tell us
                os._exit(1)
            if process["network"]:
                self._connect(process, pipes["stderr"][1], left[1], plugged[0])
            for descriptor in (*left, *plugged):
                os.close(descriptor)
            return self._become(process, pipes, prompts)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self._running[pid] = process["name"]
        if Path(process["argv"][0]).name == "mpirun":
            self._mpirun = pid
        if process["required"]:
            self._required.add(process["name"])
        for stream, (reader, writer) in pipes.items():
            os.close(writer)
            self._streams[reader] = process["name"], stream
            self._selector.register(reader, selectors.EVENT_READ)
        if prompts:
            os.close(prompts[1])
            self._prompts[prompts[0]] = process["name"]
            self._selector.register(prompts[0], selectors.EVENT_READ)
        self._tell({"event": "started", "name": process["name"], "pid": pid})
        os.close(left[1])
        os.close(plugged[0])
        try:
            if process["network"] and os.read(left[0], 1):  # nothing comes from a child that has failed
                namespaces.carry_out(process["network"]["plug"], pid)
                self._held.append(namespaces.hold_network(pid))
                os.write(plugged[1], b"!")
        finally:
            os.close(left[0])
            os.close(plugged[1])
        return None

    def _connect(self, process: dict[str, Any], stderr: int, left: int, plugged: int) -> None:
        """In the forked child: leave for a namespace of its own, wait for the cable, bring up the card."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            namespaces.leave_host(process["network"]["address"])
            os.write(left, b"!")
            os.read(plugged, 1)
            namespaces.carry_out(process["network"]["card"])
        except OSError as error:
            os.write(stderr, f"{process['name']} has no network: {error}\n".encode())
            os._exit(1)

    def _become(
        self, process: dict[str, Any], pipes: dict[str, tuple[int, int]], prompts: list[int]
    ) -> Script:
        """Turn the forked child into the process asked for: by exec, or, when warm, into the script to run."""
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        inherited = {self._control, self._events, self._wake, self._waker, *self._streams, *self._held}
        inherited |= {descriptor for pipe in pipes.values() for descriptor in pipe}
        if self._owner is not None:
            inherited.add(self._owner)
        inherited |= {*self._prompts, *prompts}
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in (
            (prompts[1] if prompts else nothing, 0),
            (pipes["stdout"][1], 1),
            (pipes["stderr"][1], 2),
        ):
            os.dup2(source, target)
        for descriptor in {*inherited, nothing} - {0, 1, 2}:
            os.close(descriptor)
        argv, environment = process["argv"], process["environment"]
        try:
            if process["host"]:
                namespaces.name_host(process["host"])
            os.chdir(process["folder"])
            # Other programs, and Python with options or without a script, are executed even where others are forked.
            if not self._fork or argv[0] != sys.executable or not os.access(argv[1], os.R_OK):
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec keeps that
                os.execvpe(argv[0], argv, environment)
        except OSError as error:
            os.write(2, f"{argv[0]} cannot be started in {process['folder']}: {error.strerror}\n".encode())
            os._exit(127)
        return job_script.forked(argv, environment)

    # Watching

    def _watch(self) -> dict[str, Any]:
        """Report until the run is decided: how it ended, and who decided it."""
        alone = 0  # looks in a row that found mpirun without ranks
        while self._required:
            if self._told_to_stop:
                return {"outcome": "stopped"}
            remaining = self._deadline - time.monotonic()
            if remaining <= 0:
                for descriptor, line in self._unended.items():  # a stack would go on with it
                    self._tell_lines(descriptor, [line] if line else [])
                self._unended.clear()
                self._tell({"event": "silent", "supervisor": os.getpid(), "is_idle": not self._called})
                self._called.clear()  # whoever answers now is late
                until = time.monotonic() + STACK_SECONDS
                self._pump_until(until, lambda: self._has_stacks or self._told_to_stop)
                return {"outcome": "timeout"}
            longest = LOOK_SECONDS if self._mpirun else 60  # a year is too long for a selector
            for name, code in self._pump(min(remaining, longest)):
                was_to_stay = self._idle_seconds and name in self._required
                if (code != 0 or was_to_stay) and not self._was_to_die(name, code):
                    name, code = self._first_cause(name, code)
                    return {"outcome": "failed", "name": name, "code": code}
                self._required.discard(name)
            alone = alone + 1 if self._is_mpirun_alone() else 0
            if alone == LOOKS:
                late = f"mpirun had not ended {LOOKS * LOOK_SECONDS:g} s after its last rank, and was stopped"
                reason = f"failed: {late}; whether its ranks succeeded is not known"
                return {"outcome": "failed", "name": "mpirun", "code": None, "reason": reason}
        return {"outcome": "succeeded"}

    def _was_to_die(self, name: str, code: int) -> bool:
        """Whether that a process ended so is part of the experiment."""
        return name in self._may_die and code == -signal.SIGKILL

    def _is_mpirun_alone(self) -> bool:
        """Whether mpirun sleeps, has told nothing since the last look, and has started ranks that have all ended."""
        if self._mpirun not in self._running or (self._had_ranks and not self._is_quiet):
            return False
        alive = _descendants()
        self._had_ranks |= len(alive) > 1
        state = Path(f"/proc/{self._mpirun}/stat").read_text().rpartition(") ")[2][0]
        return self._had_ranks and self._is_quiet and alive == [self._mpirun] and state == "S"

    def _first_cause(self, name: str, code: int) -> tuple[str, int]:
        """Who failed first: peers of a killed process may fail, by its closed connections, before its end is known.

        But one that aborts may be such a peer.
        """
        deadline = time.monotonic() + DEATH_SECONDS
        while code > 0 and (remaining := deadline - time.monotonic()) > 0:
            killed = [
                ended
                for ended in self._pump(remaining)
                if ended[1] < 0 and ended[1] != -signal.SIGABRT and not self._was_to_die(*ended)
            ]
            name, code = killed[0] if killed else (name, code)
        return name, code

    def _pump(self, seconds: float) -> list[tuple[str, int]]:
        """Wait at most `seconds` for news, report it, and return who ended and how, signals first."""
        ready = [key.fd for key, _ in self._selector.select(max(seconds, 0))]
        self._is_quiet = not ready
        for descriptor in ready:
            if descriptor in self._streams:
                self._report_lines(descriptor)
            elif descriptor in self._prompts:
                self._hear_answer(descriptor)
            elif descriptor == self._control:
                self._hear_owner()
            elif descriptor == self._owner:  # it has died
                self._selector.unregister(descriptor)
                self._told_to_stop = self._unheard = True
            else:
                while _readable(self._wake):
                    os.read(self._wake, 4096)
        return sorted(self._reap(), key=lambda ended: ended[1])

    def _hear_owner(self) -> None:
        if chunk := os.read(self._control, 1 << 16):
            self._obey(chunk)
        else:
            self._selector.unregister(self._control)
            self._told_to_stop = self._unheard = True

    def _obey(self, chunk: bytes) -> None:
        """Carry out the orders that are complete with `chunk`."""
        *lines, self._orders = (self._orders + chunk).split(b"\n")
        for line in lines:
            if line == b"stop":
                self._told_to_stop = True
            elif line == b"read":
                self._was_read = True
            else:
                order = json.loads(line)
                self._deadline = time.monotonic() + order["timeout_seconds"]
                self._called = {*self._required} if order["prompt"] else set()
                for descriptor in self._prompts if order["prompt"] else ():
                    with contextlib.suppress(OSError):  # it is ending
                        os.write(descriptor, order["prompt"].encode() + b"\n")

    def _hear_answer(self, descriptor: int) -> None:
        name = self._prompts[descriptor]
        try:
            answer = os.read(descriptor, 1)
        except ConnectionResetError:  # it was killed before it had read a prompt
            answer = b""
        if answer:
            self._drain(name)
            for each in [fd for fd, stream in self._streams.items() if stream[0] == name]:
                line = self._unended.pop(each, b"")
                self._tell_lines(each, [line] if line else [])
            if name in self._called:
                self._called.remove(name)
                if not self._called:
                    self._deadline = time.monotonic() + self._idle_seconds
                self._tell({"event": "done", "name": name})
        else:  # it has ended, or closed its input
            self._selector.unregister(descriptor)
            del self._prompts[descriptor]
            os.close(descriptor)

    def _report_lines(self, descriptor: int) -> None:
        chunk = os.read(descriptor, 1 << 16)
        *lines, rest = (self._unended.pop(descriptor, b"") + chunk).split(b"\n")
        if rest and (not chunk or len(rest) > LINE_LIMIT):
            lines.append(rest)
        elif chunk:
            self._unended[descriptor] = _shortened(rest)
        self._tell_lines(descriptor, lines)
        if not chunk:
            self._selector.unregister(descriptor)
            os.close(descriptor)
            del self._streams[descriptor]

    def _tell_lines(self, descriptor: int, lines: list[bytes]) -> None:
        name, stream = self._streams[descriptor]
        texts = [line.decode(errors="replace") for line in lines]
        if texts:
            self._tell({"event": "lines", "name": name, "stream": stream, "texts": texts})

    def _reap(self) -> list[tuple[str, int]]:
        ended: list[tuple[str, int]] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            name = self._running.pop(pid, None)
            if name is not None:  # otherwise an orphan of a rank, which became ours
                code = os.waitstatus_to_exitcode(status)
                ended.append((name, code))
                self._drain(name)
                self._tell({"event": "exited", "name": name, "code": code, "ours": -code in self._sent})

    def _drain(self, name: str) -> None:
        """Report what `name` had printed before it ended, so that its last lines are not missed."""
        for descriptor in [fd for fd, stream in self._streams.items() if stream[0] == name]:
            # One read empties a pipe, a second finds its end; what it left running may fill it for ever.
            for _ in range(2):
                if descriptor in self._streams and _readable(descriptor):
                    self._report_lines(descriptor)

    # Ending

    def _end_everything(self) -> None:
        self._signal_groups(signal.SIGTERM)
        self._signal_groups(signal.SIGCONT)  # a stopped process cannot act on SIGTERM
        self._pump_until(time.monotonic() + GRACE_SECONDS, lambda: not self._running)
        self._signal_groups(signal.SIGKILL)
        while descendants := _descendants():
            for pid in descendants:
                _kill(pid, signal.SIGKILL)
            self._pump_until(time.monotonic() + 0.05, lambda: not _descendants())
        self._pump_until(time.monotonic() + 1.0, lambda: not (self._running or self._streams))

    def _signal_groups(self, number: int) -> None:
        self._sent.add(number)
        for pid in self._running:
            if not _kill(-pid, number):  # it has been forked just now, and leads no group yet
                _kill(pid, number)

    def _pump_until(self, deadline: float, done: Callable[[], bool]) -> None:
        while not done() and (remaining := deadline - time.monotonic()) > 0:
            self._pump(min(remaining, 0.05))


def _shortened(line: bytes) -> bytes:
    """Of a progress bar its first state, which may begin with mpirun's tag, and its last; other lines as they are."""
    first, mark, states = line.partition(b"\r")
    return first + mark + states[states.rstrip(b"\r").rfind(b"\r") + 1 :]


def _readable(descriptor: int) -> bool:
    with selectors.PollSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        return bool(selector.select(0))


def _kill(pid: int, number: int) -> bool:
    """Send a signal; whether there was a process to receive it."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False  # it has ended in between, which is what we want
    return True


def _descendants() -> list[int]:
    """Every process below this one that has not ended, children before grandchildren.

    One whose first thread has ended counts as ended when no other thread is left either; until then, as with a Java
    machine that was just killed, it may still have children.
    """
    children: dict[int, list[int]] = {}
    ended = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        state, parent, threads = fields[0], int(fields[1]), int(fields[17])
        children.setdefault(parent, []).append(int(entry.parent.name))
        if state == "Z" and threads <= 1:
            ended.add(int(entry.parent.name))
    alive, frontier = [], [os.getpid()]
    while frontier:
        frontier = [child for parent in frontier for child in children.get(parent, [])]
        alive += [pid for pid in frontier if pid not in ended]
    return alive


def _write_files(folder: Path, files: dict[str, str], archives: dict[str, str]) -> None:
    """Fill `folder`: `files` are texts by path, `archives` each a `.tar.gz` in base64 by the folder for its files."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, encoded in archives.items():
        import base64  # most runs have none, and start the sooner
        import io
        import tarfile

        (folder / name).mkdir(parents=True, exist_ok=True)  # whatever it holds
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(encoded))) as file:
            file.extraction_filter = getattr(tarfile, "data_filter", None)  # Python before 3.11.4 has none
            file.extractall(folder / name)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--warm"]:
        script = warm_server.serve(sys.argv[2:], lambda *descriptors: Supervisor(True, *descriptors).run())
    else:
        script = Supervisor(False, 0, 1, *map(int, sys.argv[1:])).run()
    if script is not None:
        script()
