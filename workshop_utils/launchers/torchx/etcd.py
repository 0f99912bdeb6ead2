"""An etcd server on this machine, at which the nodes of a local run can meet.

with etcd.server() as endpoint:
    TorchX(rendezvous="etcd-v2", rendezvous_endpoint=endpoint).launch(job).wait()
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator

from workshop_utils.jobs import JobError
from workshop_utils.launchers.local.environment import inherited_variables, reserve, scratch_folder
from workshop_utils.launchers.local.run import Process, ProcessRun

READY = "ready to serve client requests"  # the last that etcd prints before it answers
LIFETIME_SECONDS = 24 * 3600.0  # of a server that nobody ends


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
    with reserve(2) as reservation:
        client, peer = (f"http://127.0.0.1:{port}" for port in reservation.ports)
        scratch = scratch_folder()
        options = {
            "data-dir": scratch / "etcd",
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",  # etcd's own name for a server
        }
        argv = (program, "--enable-v2", *(f"--{name}={value}" for name, value in options.items()))
        process = Process("etcd", argv, inherited_variables(re.compile("ETCD_")), tempfile.gettempdir())
        run = ProcessRun("etcd", ("etcd",), reservation)
        run._start([process], LIFETIME_SECONDS, scratch, {})
    with run:
        if not any(READY in line.text for line in run.logs(follow=True)):
            raise JobError(f"etcd did not start. {run.reason}")
        yield client.removeprefix("http://")
