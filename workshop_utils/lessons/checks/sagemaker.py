"""Checks of lesson 11, SageMaker; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

from collections.abc import Callable

from workshop_utils.launchers.sagemaker.toolkit import host_names
from workshop_utils.lessons.checks import Wrong, exercise, questions, result_of

__getattr__ = questions(__name__)


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
        got = result_of(answer, list(hosts))
        right = {host: "master" if host == hosts[0] else "worker" for host in hosts}
        if not isinstance(got, dict):
            raise Wrong(f"with {hosts} it gave {got!r}; it must be a dict with a role for each host.")
        if set(got) != set(hosts):
            given = f"with {hosts} it gave roles for {list(got)}"
            raise Wrong(f"{given}; it must have each host, and nothing else.")
        for rank, (host, role) in enumerate(right.items()):
            if got[host] != role:
                other = "the first in the list is the master, and all others are workers"
                because = _NOT_A_ROLE_OF_THE_SCRIPT.get(str(got[host]), other)
                is_a = f"with {hosts}, {host}, at place {rank}, is a {role}"
                raise Wrong(f"{is_a}, not {got[host]!r}: {because}.")
    return "the first host in the list is the master, all others are workers, and a server runs beside each."
