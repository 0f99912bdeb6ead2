"""What runs have in common that are carried out by processes of this machine."""

from __future__ import annotations

import re
import sys

import pytest
from conftest import reserved_ports

from workshop_utils.launchers.process_run import ProcessRun, inherited_variables, reserve, scratch_folder
from workshop_utils.processes.group import Process
from workshop_utils.runs import RunState


class Played(ProcessRun):
    """A run of one process, which listens at one port."""

    def __init__(self, code: str, timeout_seconds: float = 60.0) -> None:
        with reserve(1) as reservation:
            super().__init__("played", ("worker-0",), reservation)
            process = Process("worker-0", (sys.executable, "-c", code), inherited_variables(), "/")
            self._start([process], timeout_seconds, scratch_folder(), {})

    def _timed_out(self) -> str:
        return "too late"

    def _blame(self, name: str, code: int | None, reason: str | None) -> str:
        return f"{name}: {code}, {reason}"


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(
    ("code", "state", "reason"),
    [
        ("print('up')", RunState.SUCCEEDED, ""),
        ("print('up'); raise SystemExit(3)", RunState.FAILED, "worker-0: 3, None"),
        ("print('up', flush=True); import time; time.sleep(600)", RunState.FAILED, "too late"),
    ],
)
def test_a_run_ends_as_its_processes_do_and_lets_go_of_its_ports(
    code: str, state: RunState, reason: str
) -> None:
    before = reserved_ports()
    run = Played(code, timeout_seconds=2.0 if reason == "too late" else 60.0)
    lines = [line.text for line in run.logs(follow=True)]
    assert (lines, run.state, run.reason) == (["up"], state, reason)
    assert reserved_ports() == before


def test_ports_stay_reserved_after_the_block_but_not_where_it_raises() -> None:
    before = set(reserved_ports())
    with reserve(2) as reservation:
        assert set(reserved_ports()) - before == set(reservation.ports)
    assert set(reserved_ports()) - before == set(reservation.ports)
    reservation.release()
    with pytest.raises(ValueError, match="no such volume"), reserve(2):
        raise ValueError("no such volume")
    assert set(reserved_ports()) == before


def test_a_process_inherits_what_is_no_other_run_s(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PET_NNODES", "RANKING", "COLOUR"):
        monkeypatch.setenv(name, "x")
    found = inherited_variables()
    assert not {"RANK", "OMPI_COMM_WORLD_RANK"} & found.keys()
    assert {"PET_NNODES", "RANKING", "COLOUR"} <= found.keys()
    assert found.keys() - inherited_variables(re.compile("PET_"), re.compile("COLOUR$")).keys() == {
        "PET_NNODES",
        "COLOUR",
    }
