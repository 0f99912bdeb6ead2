"""Drive a job's ranks on Spark: TorchDistributor runs them as the tasks of one barrier stage.

    python -I driver.py WORKERS RESTARTS RANK_PROGRAM SOURCE SCRIPT ARGUMENT...

`spark-defaults.conf` in SPARK_CONF_DIR says which cluster. Each rank runs in an executor: all start together, and if
one fails all are stopped. Spark does not restart a barrier stage whose results go to the driver (DAGScheduler, "Could
not recover from a failed barrier ResultStage"), and TorchDistributor's is one: so this driver does, at most RESTARTS
times. What the ranks need travels as Spark's files: the script, the rank's program, and SOURCE, the modules that a
script may import. Their variables travel with the task.

What this prints besides the ranks' tagged lines is why it failed, in words. It is a process of the run, as mpirun is.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import socketserver
import struct
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.ml.torch import distributor
from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession

SERVER_POLL_SECONDS = 0.1
ANEW = "Spark: all ranks are started anew"
PASSING = re.compile(r"ExecutorLostFailure|ranks failed")


class LineHandler(socketserver.StreamRequestHandler):
    """Reads what a rank's LogStreamingClient sends: a length in four bytes, then a line."""

    def handle(self) -> None:
        while len(header := self.rfile.read(4)) == 4:
            (count,) = struct.unpack(">i", header)
            line = self.rfile.read(count)
            os.write(1, line + b"\n")


class LineServer:
    """In place of Spark's LogStreamingServer, which listens on every interface: on the driver's own address alone.

    Unlike Spark's it also waits at the end until every rank's last line has come.
    """

    def __init__(self) -> None:
        self.port: int | None = None

    def start(self, spark_host_address: str) -> None:
        """Begin to listen."""
        self._server = socketserver.ThreadingTCPServer((spark_host_address, 0), LineHandler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(SERVER_POLL_SECONDS,), daemon=True
        )
        self._thread.start()

    def shutdown(self) -> None:
        """Stop listening; returns once all who were connected have been heard."""
        self._server.shutdown()
        self._thread.join()
        while select.select([self._server.socket], [], [], 0)[0]:  # who has connected, and was not let in yet
            self._server.handle_request()
        self._server.server_close()  # waits for those who are being heard


def rank_starter(variables: dict[str, str], restarts: int) -> Callable[..., None]:
    """What TorchDistributor is to do in each task, in place of running a file that is there already.

    It runs in another process, so all that it needs is in it.
    """

    def start(parameters: dict[str, Any], rank: str, script: str, *arguments: str) -> None:
        from pyspark import SparkFiles
        from pyspark.ml.torch.distributor import TorchDistributor

        folder = SparkFiles.getRootDirectory()
        os.environ.update(
            variables,
            PYTHONPATH=f"{folder}/source.zip",
            WORKSHOP_RESTARTS=str(restarts),
            LOGLEVEL="CRITICAL",  # of torchrun, whose account of a failure is longer than the rank's own
        )
        files = (f"{folder}/{rank}", f"{folder}/{script}")
        with tempfile.TemporaryDirectory() as exits:
            os.environ["WORKSHOP_EXITS"] = exits
            TorchDistributor._run_training_on_pytorch_file(parameters, *files, *arguments)
            # PySpark 3.5 loses torchrun's exit code on its way (torch_run_process_wrapper.py): without this, a job
            # whose ranks have all failed would have succeeded.
            codes = [file.read_text() for file in Path(exits).iterdir()]
        if codes != ["0"]:
            raise RuntimeError(f"ranks failed; their exit codes: {', '.join(codes) or 'none'}")

    return start


def drive(workers: int, restarts: int, rank: Path, source: Path, script: Path, arguments: list[str]) -> None:
    """Run the ranks to their end; restart those that fail, at most `restarts` times. Raises what Spark raises last."""
    session = SparkSession.builder.getOrCreate()
    try:
        archive = shutil.make_archive(tempfile.mkdtemp() + "/source", "zip", source)
        for file in (archive, rank, script):
            session.sparkContext.addFile(str(file))
        distributor.LogStreamingServer = LineServer
        runner = TorchDistributor(num_processes=workers, local_mode=False, use_gpu=False)
        runner.logger.setLevel("ERROR")
        # `run` does the same with a function of its own, which expects the file to be on every executor.
        variables = json.loads(os.environ["WORKSHOP_RANK_VARIABLES"])
        before = int(variables.get("TORCHELASTIC_RESTART_COUNT", "0"))
        for attempt in range(restarts + 1):
            try:
                runner._run(rank.name, rank_starter(variables, before + attempt), script.name, *arguments)
                break
            except Exception as error:  # of many kinds; what is no rank's failure would only come again
                if attempt == restarts or not PASSING.search(str(error)):
                    raise
                print(f"{ANEW} after: {explained(str(error))}", file=sys.stderr)
    finally:
        session.stop()


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
        "the master does not take this application: it does not answer any more, or its secret is another one",
    ),
    (r"No module named '?([\w.]+)", "the executors' Python has no module {0}: install it where they run"),
    (r"ExecutorLostFailure \((.*?)\)[\s.]*?Reason: ([^\n]*)", "{0}: {1}"),
    (
        r"Error from python worker:.*?\n\s+(\w[\w.]*: [^\n]*)\nPYTHONPATH",
        "an executor's Python does not start: {0}",
    ),
    (r"(Cannot run program[^\n]*)", "an executor could not start its Python: {0}"),
    (r"(ranks failed; their exit codes: [-\d, none]+)", "{0}"),
    (r"PythonException: Traceback .*?\n(\w[\w.]*(?:Error|Exception|Exit)[^\n]*)", "{0}"),
)


def explained(text: str) -> str:
    """What Spark's account of a failure comes down to; without an explanation its first line."""
    for pattern, words in EXPLAINED:
        found = re.search(pattern, text, re.DOTALL)
        if found:
            return words.format(*found.groups())
    return next((line for line in text.splitlines() if line.strip()), "Spark said nothing")


def main() -> int:
    """Drive the job; the exit code."""
    workers, restarts, *files = sys.argv[1:]
    rank, source, script = (Path(file) for file in files[:3])
    try:
        drive(int(workers), int(restarts), rank, source, script, files[3:])
    except Exception as error:  # Spark's are of many kinds, and end here in any case
        print(f"Spark: {explained(str(error))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
