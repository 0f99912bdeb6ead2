"""Real processes to be ranks; the fixture `ranks` starts them once for a file of tests."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from workshop_utils.comm import tcp
from workshop_utils.network.ports import PortReservation

MOST_RANKS = 9


def rank_main(rank: int, size: int, coordinator: str, secret: bytes, program: Any, *args: Any) -> Any:
    """One rank: connect by TCP, run `program(communicator, *args)`, disconnect."""
    with tcp.connect(rank, size, coordinator, secret) as communicator:
        return program(communicator, *args)


class Ranks:
    """Processes that wait to be ranks."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def run(self, size: int, program: Callable[..., Any], *args: Any) -> list[Any]:
        """What each of `size` ranks returns from `program(communicator, *args)`."""
        with PortReservation(1) as port:
            run = (size, f"127.0.0.1:{port.ports[0]}", secrets.token_bytes(16), program, *args)
            futures = [self._pool.submit(rank_main, rank, *run) for rank in range(size)]
            return [future.result(timeout=120) for future in futures]
