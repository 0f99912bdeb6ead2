"""Run a job's ranks on Spark, as the tasks of one barrier stage.

    python -P driver.py RANKS RESTARTS SOURCE SCRIPT ARGUMENT...

`spark-defaults.conf` in SPARK_CONF_DIR names the cluster. RANKS is a JSON file with the variables of each rank, as the
job's strategy plans them. SOURCE is the folder of modules that the script may import; both travel as Spark's files.

All tasks of a barrier stage start together, and when one fails Spark stops the others. Spark does not retry a stage
whose results go to the driver (DAGScheduler, "Could not recover from a failed barrier ResultStage"), so this program
submits it again, at most RESTARTS times.

A rank's lines come back over TCP, tagged `[worker-1]<stdout>: `, and are printed here. The last line of a run that
failed says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from pyspark import BarrierTaskContext, SparkContext, SparkFiles

COUNT = "TORCHELASTIC_RESTART_COUNT"
AGAIN = "Spark: all ranks start again after: "
FAILED = "Spark failed: "
PR_SET_PDEATHSIG = 1


class LineServer:
    """Prints the lines that ranks send. A connection begins with the `secret` of this attempt, and a tag for each line.

    A rank's process has such connections as its standard output and standard error.
    """

    def __init__(self, host: str) -> None:
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self.secret = secrets.token_hex(16)
        self._printing = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def next_attempt(self, line: str) -> None:
        """Print `line`, and nothing more of the ranks that are connected now."""
        with self._printing:
            self.secret = secrets.token_hex(16)
            print(line, flush=True)

    def _accept(self) -> None:
        while True:
            link, _ = self._listener.accept()
            threading.Thread(target=self._receive, args=(link,), daemon=True).start()

    def _receive(self, link: socket.socket) -> None:
        with link, link.makefile("rb") as lines, contextlib.suppress(OSError):
            secret, _, tag = lines.readline(100).rstrip(b"\n").partition(b" ")
            for line in lines:
                with self._printing:
                    if not secrets.compare_digest(secret, self.secret.encode()):
                        return
                    sys.stdout.buffer.write(tag + line.rstrip(b"\n") + b"\n")
                    sys.stdout.buffer.flush()


def die_with_parent() -> None:
    """Have the kernel end this process when the one that started it ends (prctl(2))."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def rank_task(
    ranks: list[dict[str, str]], address: tuple[str, int], secret: str, script: str, *arguments: str
) -> Callable[[Iterable[int]], Iterable[int]]:
    """What each task does: it runs the script with the variables of the rank that has the task's number.

    The function travels to the executors, so all that it needs is in this file and in Python itself.
    """

    def run(_: Iterable[int]) -> Iterable[int]:
        context = BarrierTaskContext.get()
        rank, folder = context.partitionId(), SparkFiles.getRootDirectory()
        host = context.getTaskInfos()[0].address.partition(":")[0]
        with socket.socket() as listener:  # each rank looks for a free port, and all take the first one's
            listener.bind((host if rank == 0 else "", 0))
            port = context.allGather(str(listener.getsockname()[1]))[0]
        words = {"{host}": host, "{port}": port}
        own = {name: words.get(value, value) for name, value in ranks[rank].items()}
        streams = [socket.create_connection(address) for _ in range(2)]
        for stream, name in zip(streams, ("stdout", "stderr"), strict=True):
            stream.sendall(f"{secret} [worker-{rank}]<{name}>: \n".encode())
        code = subprocess.Popen(
            [sys.executable, f"{folder}/{script}", *arguments],
            env={**os.environ, **own, "PYTHONPATH": f"{folder}/source.zip"},
            stdin=subprocess.DEVNULL,
            stdout=streams[0].fileno(),
            stderr=streams[1].fileno(),
            preexec_fn=die_with_parent,
        ).wait()
        for stream in streams:
            stream.shutdown(socket.SHUT_WR)  # also where the script has left a process with it
            stream.recv(1)  # the driver closes it once all is printed
        if code:
            raise RuntimeError(f"rank {rank} ended with code {code}")
        return ()

    return run


def drive(ranks: list[dict[str, str]], restarts: int, source: Path, script: Path, words: list[str]) -> None:
    """Run the ranks to their end, and start them again if one fails. Raises what Spark raises last."""
    context = SparkContext.getOrCreate()
    try:
        host = context.getConf().get("spark.driver.host")
        assert host is not None  # Spark fills it in
        server, before = LineServer(host), int(ranks[0].get(COUNT, "0"))
        for file in (shutil.make_archive(tempfile.mkdtemp() + "/source", "zip", source), str(script)):
            context.addFile(file)
        for attempt in range(restarts + 1):
            told = [{**rank, COUNT: str(before + attempt)} for rank in ranks]
            task = rank_task(told, server.address, server.secret, script.name, *words)
            try:
                context.parallelize(range(len(ranks)), len(ranks)).barrier().mapPartitions(task).collect()
                break
            except Exception as error:  # Spark has many kinds; any but a lost rank would only come back
                if attempt == restarts or not LOST_RANK.search(str(error)):
                    raise
                server.next_attempt(f"{AGAIN}{explained(str(error))}")
    finally:
        context.stop()


EXPLAINED = (
    (
        r"PYTHON_VERSION_MISMATCH\].*?version \(?['\"]?(\d+)(?:, |\.)(\d+).*?driver[^\d]*(\d+\.\d+)",
        "the executors' Python is {0}.{1}, and the driver's {2}: both must have the same minor version. Name another "
        "in place.yaml, as in 'python: /usr/bin/python3.11', or install it where the executors run",
    ),
    (
        r"\[SPARK-24819\]|requires more slots than the total number",
        "the cluster has fewer free cores than the job has workers, and a barrier stage needs them all at once: give "
        "the job fewer workers, or the cluster more cores",
    ),
    (
        r"All masters are unresponsive|SparkContext was shut down|stopped SparkContext",
        "the master does not take this application: it no longer answers, or its secret is another one",
    ),
    (r"No module named '?([\w.]+)", "the executors' Python has no module {0}: install it where they run"),
    (r"ExecutorLostFailure \((\S+ \S+).*?Reason: ([^\n]*)", "{0} was lost ({1})"),
    (r"(rank \d+ ended with code -?\d+)", "{0}"),
    (
        r"(?:PythonException: Traceback.*?|finished unsuccessfully\.)\n(\w[\w.]*(?:Error|Exception|Exit)\b[^\n]*)",
        "{0}",
    ),
)
LOST_RANK = re.compile(r"ExecutorLostFailure|rank \d+ ended with code")


def explained(text: str) -> str:
    """Spark's account of a failure in a sentence: our own words where we have some, otherwise its first line."""
    for pattern, words in EXPLAINED:
        if match := re.search(pattern, text, re.DOTALL):
            return words.format(*match.groups())
    return next((line for line in text.splitlines() if line.strip()), "Spark gave no reason")


if __name__ == "__main__":
    ranks_file, restart_count, source_folder, script_file, *words = sys.argv[1:]
    try:
        planned = json.loads(Path(ranks_file).read_text())
        drive(planned, int(restart_count), Path(source_folder), Path(script_file), words)
    except Exception as error:  # whatever Spark raised, the run ends with its explanation
        sys.exit(f"{FAILED}{explained(str(error))}")
