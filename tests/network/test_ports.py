import functools
import socket
import subprocess
import sys
import textwrap
import time

import pytest
from conftest import save

from workshop_utils.network import ports
from workshop_utils.network.ports import PortReservation


def only(monkeypatch, count):
    """Leave so many candidates, which are free just now."""
    with PortReservation(1) as probe:
        first = probe.ports[0]
    while True:
        monkeypatch.setattr(ports, "LOWEST", first)
        monkeypatch.setattr(ports, "_first_ephemeral_port", functools.partial(int, first + count))
        try:
            PortReservation(count).release()
        except OSError:
            first += count
        else:
            return list(range(first, first + count))


def test_two_reservations_never_share_a_port_until_one_lets_go(monkeypatch):
    candidates = only(monkeypatch, 3)
    with PortReservation(2) as first:
        with PortReservation(1) as second:
            assert sorted(first.ports + second.ports) == candidates
        with pytest.raises(OSError, match="there are not 2 free ports"):
            PortReservation(2)
        PortReservation(1).release()  # the attempt that failed has kept none
    PortReservation(3).release()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_on_which_somebody_listens_is_not_reserved(host, monkeypatch):
    candidates = only(monkeypatch, 2)
    with socket.create_server((host, candidates[0])), PortReservation(1) as reservation:
        assert reservation.ports == [candidates[1]]


# Every launcher says how its runs ended; all of them run at the same time, until the last has bound its ports. There
# are hardly more ports than they need, so that any two launches would meet if nothing kept them apart.
LAUNCHER = """
    import sys
    from workshop_utils.jobs import TrainingJob
    from workshop_utils.launchers.local import Local
    from workshop_utils.network import ports
    ports._first_ephemeral_port = lambda: ports.LOWEST + 64
    job = TrainingJob.load(sys.argv[1])
    for run in [Local().launch(job) for _ in range(5)]:
        print(run.wait().state)
"""

BINDER = """
    import json, os, socket, time
    from pathlib import Path
    config = json.loads(os.environ["TF_CONFIG"])
    own = config["cluster"]["worker"][config["task"]["index"]]
    host, port = own.split(":")
    listener = socket.create_server((host, int(port)))
    (Path({folder!r}) / f"bound-{{port}}").touch()
    while not (Path({folder!r}) / "go").exists():
        time.sleep(0.2)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_left")
def test_twenty_launches_at_once_bind_their_ports_without_a_clash(make_job, tmp_path):
    bound = tmp_path / "bound"
    bound.mkdir()
    script = BINDER.format(folder=str(bound))
    job = make_job(script, strategy="multi_worker_mirrored", workers=2, timeout="3min")
    save(job)
    launcher = [sys.executable, "-c", textwrap.dedent(LAUNCHER), str(job.folder)]
    running = [
        subprocess.Popen(launcher, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(4)
    ]
    deadline = time.monotonic() + 150
    while len(list(bound.iterdir())) < 40 and time.monotonic() < deadline:
        if any(process.poll() is not None for process in running):
            break
        time.sleep(0.2)
    at_once = len(list(bound.iterdir()))
    (bound / "go").touch()
    said = [process.communicate(timeout=120)[0] for process in running]
    assert said == ["succeeded\n" * 5] * 4
    assert at_once == 40
