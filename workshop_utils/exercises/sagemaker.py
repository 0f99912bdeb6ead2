"""Checks of lesson 11, SageMaker; see `workshop_utils.exercises` for how a check speaks."""

from __future__ import annotations

from collections.abc import Callable

from workshop_utils.exercises import NotYet, Wrong, exercise, is_missing, number
from workshop_utils.launchers.sagemaker.hosts import host_names

processes_of_five_hosts = number(
    10,
    "processes",
    "each of the 5 hosts runs a server and the script: 5 servers, 4 workers and a master",
    {
        5: "that is one a host; beside each script there runs a server",
        4: "those are the workers alone; there are servers, and a master",
        9: "5 servers and 4 workers; the script runs on the first host as well, as the master",
        6: "that would be one server; in the classic mode every host has one",
        15: "the master is the script on the first host; there is no third process",
    },
)
most_dollars = number(
    4 * 3.825 * 1.5,
    "dollars",
    "4 instances × 3.825 $/h × 1.5 h, whatever the job does until its limit",
    {
        5.7375: "that is one instance; you pay for all four, whether they compute or wait",
        15.3: "that is one hour; the limit is 90 minutes",
        3.825: "that is one instance for one hour",
        1377: "3.825 $ is for an hour, not for a minute",
        0.0956: "90 minutes are 1.5 hours: multiply the price of an hour, do not divide it",
    },
)
place_of_the_second_host = number(
    4,
    "",
    "sorted as text, algo-1, algo-10, algo-11 and algo-12 stand before algo-2, and ranks count from 0",
    {
        1: "so it would be if hosts were sorted by their number; they are sorted as text",
        5: "that is counted from 1; ranks count from 0",
        2: "that is the number in its name; look at the list that section 2 printed",
        11: "hosts with two digits come earlier, but only those that begin with a 1",
    },
)
_NOT_A_ROLE_OF_THE_SCRIPT = {
    "ps": "a server runs beside every script, but what is asked for is the script's own role",
    "server": "a server runs beside every script, but what is asked for is the script's own role",
    "chief": "that is the name that TensorFlow 2 gave it; the classic mode still says master",
}


@exercise
def tf_config_roles(answer: Callable[[list[str]], dict[str, str]]) -> str:
    """`answer(hosts)` is the role of the script on each host in the classic mode: master for the first, or worker."""
    for count in (2, 3, 12):
        hosts = list(host_names(count))
        got = answer(list(hosts))
        if is_missing(got):
            raise NotYet("your function gave nothing: write it, then run this again.")
        right = {host: "master" if host == hosts[0] else "worker" for host in hosts}
        if not isinstance(got, dict):
            raise Wrong(
                f"with {count} hosts it gave {got!r}, which is {type(got).__name__}; it must be a dict, with a role "
                "for each host."
            )
        _one_role_each(got, hosts)
        for rank, (host, role) in enumerate(right.items()):
            if got[host] == role:
                continue
            because = _NOT_A_ROLE_OF_THE_SCRIPT.get(
                str(got[host]), "the first in the list is the master, and all others are workers"
            )
            raise Wrong(f"with {hosts}, {host}, at place {rank}, is a {role}, not {got[host]!r}: {because}.")
    return "the first host in the list is the master, all others are workers, and a server runs beside each."


def _one_role_each(got: dict[str, str], hosts: list[str]) -> None:
    if missing := [host for host in hosts if host not in got]:
        raise Wrong(
            f"with {len(hosts)} hosts there is no role for {', '.join(missing)}; there must be a role for each."
        )
    if others := [str(name) for name in got if name not in hosts]:
        raise Wrong(
            f"with {len(hosts)} hosts there is a role for {', '.join(others)}, which is none of them."
        )
