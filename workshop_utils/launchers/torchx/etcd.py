"""An etcd server on this machine, at which the nodes of a local run can meet.

with etcd.server() as endpoint:
    TorchX(rendezvous="etcd-v2", rendezvous_endpoint=endpoint).launch(job).wait()
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

from workshop_utils.jobs import JobError
from workshop_utils.processes.group import Event, Process, ProcessGroup
from workshop_utils.processes.ports import PortReservation

START_SECONDS = 60.0
LIFE_SECONDS = 24 * 3600.0  # nobody's server runs for longer
LAST_LINES = 6


def is_installed() -> bool:
    """Whether this machine has an etcd server."""
    return shutil.which("etcd") is not None


@contextlib.contextmanager
def server() -> Iterator[str]:
    """An etcd server on loopback, with data of its own, both gone afterwards; its `host:port`.

    torchrun speaks etcd's API of version 2, which servers up to 3.5 have when they are asked for it.

    Raises:
        JobError: if there is none on this machine, or it does not start.
    """
    program = shutil.which("etcd")
    if program is None:
        raise JobError("there is no etcd on this machine; Debian's package is etcd-server")
    scratch = Path(tempfile.gettempdir()) / f"workshop-{uuid.uuid4().hex}"
    said: list[str] = []
    ended = threading.Event()

    def on_event(event: Event) -> None:
        if event["event"] == "line":
            said.append(event["text"])
        elif event["event"] == "ended":
            ended.set()

    with PortReservation(2) as reservation:
        client, peer = (f"127.0.0.1:{port}" for port in reservation.ports)
        group = ProcessGroup(
            [_process(program, client, peer, scratch)], on_event, LIFE_SECONDS, scratch, {"data/.keep": ""}
        )
        try:
            _wait_until_it_answers(client, ended, said)
            yield client
        finally:
            group.stop()
            ended.wait()


def _process(program: str, client: str, peer: str, scratch: Path) -> Process:
    words = {
        "name": "workshop",
        "data-dir": str(scratch / "etcd"),
        "listen-client-urls": f"http://{client}",
        "advertise-client-urls": f"http://{client}",
        "listen-peer-urls": f"http://{peer}",
        "initial-advertise-peer-urls": f"http://{peer}",
        "initial-cluster": f"workshop=http://{peer}",
        "log-level": "error",
    }
    argv = (program, "--enable-v2", *(f"--{name}={value}" for name, value in words.items()))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
    return Process("etcd", argv, environment, tempfile.gettempdir())


def _wait_until_it_answers(client: str, ended: threading.Event, said: list[str]) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback needs no proxy
    deadline = time.monotonic() + START_SECONDS
    problem = "it does not answer"
    while not ended.wait(0.05) and time.monotonic() < deadline:
        try:
            with opener.open(f"http://{client}/v2/keys/", timeout=5):
                return
        except urllib.error.HTTPError as error:
            problem = f"it has no API of version 2 (it answered {error.code}); etcd 3.6 dropped it"
            if error.code == 404:
                break
        except OSError as error:  # not yet
            problem = f"it does not answer ({error})"
    if ended.is_set():
        problem = "it has ended"
    last = "".join(f"\n  {line}" for line in said[-LAST_LINES:])
    raise JobError(f"etcd did not start: {problem}{last}")
