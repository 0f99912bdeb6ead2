"""The names of a job's hosts, in SageMaker's order."""

from __future__ import annotations

from collections.abc import Sequence


def host_names(count: int) -> tuple[str, ...]:
    """`algo-1` to `algo-COUNT` as SageMaker lists them: sorted as text, so `algo-10` stands before `algo-2`."""
    return tuple(sorted(f"algo-{number}" for number in range(1, count + 1)))


def order_of(hosts: Sequence[str]) -> list[int]:
    """The numbers in `algo-N`, in the order of `hosts`; for a lesson that shows how text is sorted."""
    return [int(host.removeprefix("algo-")) for host in hosts]
