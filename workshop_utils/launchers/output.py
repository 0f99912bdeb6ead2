"""How processes end, and the cause in what they printed, in words: the same for every run."""

from __future__ import annotations

import itertools
import re
import signal
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence

from workshop_utils import logs
from workshop_utils.runs import Run

# What is not shown: an address with a password, or a key as services write theirs, and the values of such names.
SECRET_VALUE = re.compile(
    r"\w://[^/\s@]*:[^/\s@]+@"
    r"|\b(sk-(\w{6}|proj-|ant-)|gh[a-z]_\w{9}|AKIA\w{9}|xox\w-|hf_[A-Za-z0-9]{13}|glpat-\w{6}|eyJ[\w-]+\.eyJ)"
)
# Options such as --pad_token and --image-key name tokens of a text and columns of a table; variables do not.
SECRET = re.compile(
    r"(?i)secret|pass(w|phr|$)|[._-]pwd?$|auth(?!or)|cred(?!it)"
    r"|(?<!\b(?-i:max|min|num|pad|eos|bos|cls|sep|unk)[_-])(?<!\b(?-i:mask)[_-])token(?!iz|s|[_-](?-i:len|dim|type))"
    r"|(?<!\b(?-i:image|label|input|audio|video)[_-])(?<!\b(?-i:text|sort)[_-])key(_id)?$"
)
LAST_LINES = 12  # of a worker that failed without a traceback, in the message
MOST_LINES = 10, 20  # of a traceback, from its beginning and from its end
MOST_READ = 10_000  # lines of a log, the last ones
MOST_AFTER = 6, 6  # of what follows it: more of its message, or what was printed while the process ended

# Keras 3 lies in `keras/src`, and Keras 2, as `tf_keras`, in `tf_keras/src`.
_KERAS_3 = (
    r"/keras/src/[\s\S]*(PerReplica|create_per_worker_dataset|\bKeras 3|KerasTensor cannot"
    r"|must end in `\.(keras|weights)|not recognized: \{'(lr|decay)'|/horovod/_keras/)"
    r"|(Trainer\.compile|TensorFlowTrainer\.\w+)\(\) got an unexpected keyword"
    r"|module 'keras[\w.]*' has no attribute '(experimental|legacy|[gs]et_value|get_session)'"
    r"|'Variable' object has no attribute 'ref'"
)
# Words in the cause of a failure, and a sentence that helps.
HINTS = {
    r"not compiled with CUDA|_cuda_setDevice|NCCL built in|no NVIDIA driver|accelerator device when none|"
    r"TCPStore world size cannot be 0": "The process sees no GPU: --gpus 1 gives it one where there is one, and "
    "docs/your_script.md says under Devices how to try such a script on CPUs.",
    _KERAS_3: "Scripts for Keras 2 fail so under Keras 3: they need `workshop install tf-keras`, and "
    "TF_USE_LEGACY_KERAS: 1 in the job's `environment`.",
    "Keras cannot be imported": "TF_USE_LEGACY_KERAS asks for Keras 2, which `workshop install tf-keras` brings.",
    r"operator torchvision::\w+ does not exist": "This torchvision fits another PyTorch, for CUDA or for CPUs alone: "
    "`workshop install torchvision` finds the right one where it reaches PyTorch's own index.",
    r"environment variable (RANK|WORLD_SIZE|MASTER_ADDR) expected": "--strategy torch_ddp starts the script as "
    "torchrun would.",
    "MPI_ERR_RANK: invalid rank": "Without --strategy mpi, MPI sees one rank alone.",
    "EADDRINUSE": "Another process has the port. A script that starts its own, by mp.spawn, is one worker: leave "
    "--strategy out.",
    r"error: unrecognized arguments: .*\b(True|False|None)\b": "In `arguments`, a bare flag is written `name:` with "
    "nothing after it, or as a word in a list, such as `[--name]`.",
}
# The same where a machine is to blame, and not a script.
OF_MACHINES = {
    "No space left on device|Disk quota exceeded": "A disk is full: free some of it; if it is that of {temporary}, "
    "where runs have their folders, TMPDIR may name another.",
    r"\bSemLock\(|shared memory object|insufficient shared memory": "Processes share memory in /dev/shm, which is full "
    "or cannot be written here: mount a tmpfs there, or give a container more of it, as by --shm-size=1g.",
}

TRACEBACK = re.compile(r"Traceback \(most recent call last\):$")
# A stack as Python's faulthandler prints it: a heading, then the frames, the innermost first.
HEADING = re.compile(r".*?(Current thread .+|Thread .+|Stack) \(most recent call first\):$")
FRAME = re.compile(r'(?: *File "|  )(?P<file>[^"]+)"?, line (?P<line>\d+) in (?P<function>.+)')
# What is not the user's: packages, this one, and what starts a script.
NOT_THE_USERS = re.compile(
    r"/(site|dist)-packages/|/lib/python|/workshop_utils/|/bin/torchrun$|/sm_drivers/|/emulated_instance\.py$|^<"
)
Frames = Sequence[re.Match[str]]
FATAL = "Fatal Python error: "  # what it prints first where a signal ends the process
# The other lines that it prints then.
CRASH = re.compile(
    rf"{FATAL}|{HEADING.pattern}|{FRAME.pattern}|(Extension modules|Python runtime state): |$"
    "|Current thread's C stack|  (Binary file |[.<])"
)

# What joins a traceback to the one before it: Python's own words, and those of PyTorch's workers.
_JOINED = re.compile(
    r"direct cause of the following|During handling of the above|following error:$|Original Trace"
)
# What Python prints of an error that did not end the process.
_ASIDE = re.compile(r"^(Exception ignored in|Exception in thread|--- Logging error)")
_EXCEPTION = r"[\w.]+(?:Error|Exception)\b"
# How a script is started, in its traceback.
_STARTERS = re.compile(
    r'^ *File "(?:<frozen runpy>|[^"]*/mpi4py/(?:__main__|run)\.py)", .*\n(?: {4}.*\n)*',
    re.M,
)
# What launchers add of their own: Open MPI, torchrun, the drivers of SageMaker's SDK.
_BANNERS = re.compile(
    r"^-{70,}\n(?:MPI_ABORT|mpirun|prterun|Primary job)(?:.*\n)*?-{70,}\n"
    r"|^[EWI]\d{4} [\d:.]+ \d+ \S*(?:elastic/\S+|distributed/run\.py:\d+)\] .*\n"
    r"|^.*Traceback \(most recent call last\):\n"
    r' *File "[^"]*/(?:torchrun|torch/distributed/run\.py|sm_drivers/[^"]+)".*\n'
    rf"(?:(?!{_EXCEPTION}).*\n)*{_EXCEPTION}.*\n(?:={{10,}}\n(?:.*\n)*?={{10,}}\n)?"
    r"|^Executing command: .*\n",
    re.M,
)
_CULPRIT = re.compile(r"(?:process|invoked on) rank (\d+)\b|Process name: \[[^\]]*,(\d+)\]")
_SIGNAL = re.compile(r"exited on\s+signal (\d+)")


def is_secret(name: str, value: str) -> bool:
    """Whether a variable is not to be shown, by its name or by the form of its value."""
    return bool(SECRET.search(name) or SECRET_VALUE.search(value))


def masked(name: str, value: str) -> str:
    """The value of a variable as it may be shown: **** for a secret."""
    return "****" if is_secret(name, value) else value


def culprit(texts: Iterable[str]) -> tuple[str | None, int | None]:
    """Which worker failed first according to mpirun's own lines, and the exit code if a signal killed it."""
    text = "\n".join(texts)
    rank, killed = _CULPRIT.search(text), _SIGNAL.search(text)
    return rank and f"worker-{rank[1] or rank[2]}", killed and -int(killed[1])


def how(code: int) -> str:
    """How a process with this exit code ended; a negative one is that of a signal, as in `subprocess`."""
    # A real-time signal has no name.
    name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
    return f"was killed by {name}" if code < 0 else f"ended with exit code {code}"


def explained(run: Run, names: Collection[str], code: int = 1) -> str:
    """Why a process failed that is among `names`: the cause in what it printed, and where all of that is.

    Of several, the one that a launcher blames, or whose traceback came first.
    """
    lines = [line for line in run.logs() if line.worker in names]
    blamed, _ = culprit(line.text for line in lines)
    if blamed not in names:
        raised = (line.worker for line in lines if TRACEBACK.search(line.text))
        blamed = next(raised, next(iter(names)) if len(names) == 1 else None)
    texts = [line.text for line in lines if line.worker == blamed] if blamed else [*map(str, lines)]
    texts, stack = split_crash(texts)
    # What is killed has raised nothing, though it may have survived a traceback before; PyTorch aborts after one.
    is_killed = code < 0 and code != -signal.SIGABRT
    cause = stack + (last_lines(texts) if is_killed else _cause(texts))
    log = run.log_folder and (run.log_folder / f"{blamed}.log" if blamed else run.log_folder)
    where = f"The whole log is in {logs.shown(log)}" if log and log.exists() else ""
    return "\n".join(filter(None, [cause, *hints(cause, {**HINTS, **OF_MACHINES}), where]))


def hints(cause: str, table: Mapping[str, str] = OF_MACHINES) -> list[str]:
    """The sentences of `table` that help with a `cause`."""
    found = [hint for pattern, hint in table.items() if re.search(pattern, cause)]
    return [hint.replace("{temporary}", tempfile.gettempdir()) for hint in found]


def last_lines(texts: Sequence[str]) -> str:
    """The last of what a worker printed."""
    return _shown("Its last lines", texts[-LAST_LINES:]) if texts else "It had printed nothing."


def frames_of(lines: Sequence[str]) -> Frames:
    """The frames of the last stack in `lines`, the innermost first, without how the script or function was started."""
    frames: list[re.Match[str]] = []
    for line in lines:
        if HEADING.match(line):
            frames = []
        elif (match := FRAME.match(line)) and "<frozen importlib" not in match["file"]:
            frames.append(match)
    users = [number + 1 for number, frame in enumerate(frames) if is_the_users(frame)]
    return frames[: max(users, default=len(frames))]


def is_the_users(frame: re.Match[str]) -> bool:
    return not NOT_THE_USERS.search(frame["file"])


def called(frame: re.Match[str]) -> str:
    return f"{frame['function']} ({_short(frame['file'])}, line {frame['line']})"


def _short(file: str) -> str:
    """A path without the folders that say more of the machine than of the program."""
    for folder in ("/site-packages/", "/dist-packages/"):
        if folder in file:
            return file.rpartition(folder)[2]
    library = re.search(r"/lib/python[\d.]+/(.+)", file)
    return library[1] if library else file.rpartition("/")[2]


def position_of(frames: Frames) -> str:
    """The innermost line that is the user's.

    Where there is none, since a function has returned and its rank has yet to leave, it is the innermost line of all.
    """
    number = next((each for each, frame in enumerate(frames) if is_the_users(frame)), 0)
    inner = [frame["function"] for frame in frames[: number + 1]]
    called = next((name for name in inner if not name.startswith("_")), inner[0])
    frame = frames[number]
    return f"{frame['file'].rpartition('/')[2]}, line {frame['line']} (in {called})"


def split_crash(texts: Iterable[str]) -> tuple[list[str], str]:
    """`texts` without what Python printed at a fatal signal, and that in words; "" if it stood in no user's line."""
    others: list[str] = []
    stacks: list[list[str]] = []
    fatal = ""
    for text in texts:
        if FATAL in text:
            before, _, fatal = text.partition(FATAL)
            others += [before] if before else []
            stacks = []
        elif not fatal or not CRASH.match(text):
            others.append(text)
        elif HEADING.match(text):
            stacks.append([text])
        elif stacks:
            stacks[-1].append(text)
    stacks.sort(key=lambda stack: not stack[0].startswith("Current"))
    users = [frames for frames in map(frames_of, stacks) if any(map(is_the_users, frames))]
    if not users:
        return others, ""
    shown = _shown("Its stack, the innermost call first", _trimmed(list(map(called, users[0])), *MOST_LINES))
    return others, f"{FATAL}{fatal}, at {position_of(users[0])}. {shown}\n"


def _cause(texts: Sequence[str]) -> str:
    """The traceback of a process that ended with one, else the complaint about its arguments, else its last lines.

    Where torchrun says that one of its processes failed, all of which print here, it is the first traceback.
    """
    printed = "".join(f"{text}\n" for text in texts[-MOST_READ:])
    lines = _BANNERS.sub("", _STARTERS.sub("", printed)).rstrip().split("\n")
    lines = lines if lines != [""] else []
    before = {
        number: next((each for each in reversed(lines[:number]) if each.strip()), "")
        for number, line in enumerate(lines)
        if TRACEBACK.search(line)
    }
    chains = [each for each in before if not _JOINED.search(f"{before[each]}\n{lines[each]}")]
    if not chains:
        usage = [number for number, line in enumerate(lines) if re.match("(?i)usage: ", line)]
        if usage and any("error: " in line.lower() for line in lines[usage[-1] :]):
            return _shown("It said", _trimmed(lines[usage[-1] :], *MOST_LINES))
        return last_lines(lines)
    blocks = []
    for start, end in itertools.pairwise([*chains, len(lines)]):
        last = _end(lines, max(number for number in before if number < end))
        after = [line for line in lines[last + 1 : end] if not _ASIDE.match(line)]
        shown = _trimmed(lines[start : last + 1], *MOST_LINES) + _trimmed(after, *MOST_AFTER)
        blocks.append((not _ASIDE.match(before[start]), last < end, shown))
    first = "ChildFailedError" in printed  # whose traceback is whole, since several processes print at once
    *_, shown = max(blocks if first else reversed(blocks), key=lambda block: block[: 2 if first else 1])
    return _shown("Its traceback", shown)


def _end(lines: Sequence[str], heading: int) -> int:
    """The number of the line that names the error; SageMaker's drivers have taken the indents away."""
    number = heading + 1
    while number < len(lines) and (
        frame := re.match(r'(?:\[rank\d+\]: )?( +|File "(<?)|[ ~^]+$)', lines[number])
    ):
        number += 2 if frame[1].startswith("File") and not frame[2] else 1
    return number


def _trimmed(lines: Sequence[str], head: int, tail: int) -> list[str]:
    left_out = len(lines) - head - tail
    return [*lines[:head], f"... ({left_out} lines)", *lines[-tail:]] if left_out > 1 else [*lines]


def _shown(heading: str, lines: Iterable[str]) -> str:
    return "\n  ".join([f"{heading}:", *lines])
