"""Checks of lesson 11, SageMaker; see `workshop_utils.exercises` for how a check speaks."""

from __future__ import annotations

from collections.abc import Callable

from workshop_utils.exercises import NotYet, Wrong, exercise, number
from workshop_utils.launchers.sagemaker.hosts import host_names

processes_of_five_hosts = number(
    10, "processes", "each of the 5 hosts runs a server and the script: 5 servers, 4 workers and a master"
)
most_dollars = number(
    4 * 3.825 * 1.5, "dollars", "4 instances × 3.825 $/h × 1.5 h, whatever the job does until its limit"
)
place_of_the_second_host = number(
    4, "", "sorted as text, algo-1, algo-10, algo-11 and algo-12 stand before algo-2, and ranks count from 0"
)


@exercise
def tf_config_roles(answer: Callable[[list[str]], dict[str, str]]) -> str:
    """`answer(hosts)` is the role of the script on each host in the classic mode: master for the first, or worker."""
    for count in (2, 3, 12):
        hosts = list(host_names(count))
        got = answer(list(hosts))
        if got is None or got is ...:
            raise NotYet("your function gave nothing: write it, then run this again.")
        right = {host: "master" if host == hosts[0] else "worker" for host in hosts}
        if not isinstance(got, dict) or set(got) != set(right):
            raise Wrong(
                f"with {count} hosts it gave {got!r}; it must hold a role for each of them and nothing else."
            )
        for host, role in right.items():
            if got[host] != role:
                raise Wrong(
                    f"with {hosts}, {host} is a {role}, not {got[host]!r}: the first in the list is the master."
                )
    return "the first host in the list is the master, all others are workers, and a server runs beside each."
