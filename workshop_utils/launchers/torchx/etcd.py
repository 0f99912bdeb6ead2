"""An etcd server on this machine, at which the nodes of a local run can meet.

with etcd.server() as endpoint:
    TorchX(rendezvous="etcd-v2", rendezvous_endpoint=endpoint).launch(job).wait()
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator

from workshop_utils.jobs import JobError
from workshop_utils.launchers import output
from workshop_utils.launchers.local.environment import inherited_variables, scratch_folder
from workshop_utils.launchers.local.group import Event, Process, ProcessGroup
from workshop_utils.network.ports import PortReservation

START_SECONDS = 60.0
LIFE_SECONDS = 24 * 3600.0  # nobody's server runs for longer


def is_installed() -> bool:
    """Whether this machine has an etcd server."""
    return shutil.which("etcd") is not None


@contextlib.contextmanager
def server() -> Iterator[str]:
    """An etcd server on loopback, with data of its own, both gone afterwards; its `host:port`.

    torchrun uses version 2 of etcd's API, which servers up to 3.5 have when they are asked for it.

    Raises:
        JobError: if there is none on this machine, or it does not start.
    """
    program = shutil.which("etcd")
    if program is None:
        raise JobError("there is no etcd on this machine; Debian's package is etcd-server")
    scratch = scratch_folder()
    printed: list[str] = []
    ended = threading.Event()

    def on_event(event: Event) -> None:
        if event["event"] == "line":
            printed.append(event["text"])
        elif event["event"] == "ended":
            ended.set()

    with PortReservation(2) as reservation:
        client, peer = (f"127.0.0.1:{port}" for port in reservation.ports)
        options = {
            "data-dir": scratch / "etcd",
            "listen-client-urls": f"http://{client}",
            "advertise-client-urls": f"http://{client}",
            "listen-peer-urls": f"http://{peer}",
            "initial-advertise-peer-urls": f"http://{peer}",
            "initial-cluster": f"default=http://{peer}",  # etcd's own name for a server
            "log-level": "error",
        }
        argv = (program, "--enable-v2", *(f"--{name}={value}" for name, value in options.items()))
        process = Process("etcd", argv, inherited_variables(re.compile("ETCD_")), tempfile.gettempdir())
        group = ProcessGroup([process], on_event, LIFE_SECONDS, scratch)
        try:
            if not _answers(client, ended):
                raise JobError(f"etcd did not start. {output.last_lines(printed)}")
            yield client
        finally:
            group.stop()
            ended.wait()


def _answers(client: str, ended: threading.Event) -> bool:
    """Wait for the server; whether it answers, before it ends or START_SECONDS have passed."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback needs no proxy
    deadline = time.monotonic() + START_SECONDS
    while not ended.wait(0.05) and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            opener.open(f"http://{client}/v2/keys/", timeout=5).close()
            return True
    return False
