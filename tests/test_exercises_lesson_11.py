"""The checks of lesson 11."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from workshop_utils.exercises import sagemaker as exercises
from workshop_utils.launchers.sagemaker import contract, prices
from workshop_utils.launchers.sagemaker.hosts import host_names


@pytest.mark.parametrize(
    ("check", "right", "wrong", "said"),
    [
        (exercises.processes_of_five_hosts, 10, 5, "beside each script there runs a server"),
        (exercises.processes_of_five_hosts, 10, 9, "as the master"),
        (exercises.most_dollars, 22.95, 15.3, "the limit is 90 minutes"),
        (exercises.most_dollars, 22.95, 5.7375, "one instance"),
        (exercises.place_of_the_second_host, 4, 1, "sorted as text"),
        (exercises.place_of_the_second_host, 4, 5, "count from 0"),
    ],
)
def test_numbers_are_told_right_from_wrong(
    check: Callable[[Any], Any], right: float, wrong: float, said: str
) -> None:
    assert check(right).state == "right"
    verdict = check(wrong)
    assert (verdict.state, said in verdict.text) == ("wrong", True), verdict
    assert check(...).state == "not yet"


def test_the_numbers_are_those_of_the_contract_and_of_the_price_table() -> None:
    cluster = contract.parameter_server_cluster(list(host_names(5)))
    assert exercises.processes_of_five_hosts(sum(map(len, cluster.values()))).state == "right"
    assert prices.DOLLARS_AN_HOUR["ml.p3.2xlarge"] == 3.825
    assert exercises.place_of_the_second_host(host_names(12).index("algo-2")).state == "right"


def test_the_toolkit_s_own_rule_is_right_and_others_are_told_why_not() -> None:
    def by_config(hosts: list[str]) -> dict[str, str]:
        return {host: contract.parameter_server_config(hosts, host)["task"]["type"] for host in hosts}

    assert exercises.tf_config_roles(by_config).state == "right"
    assert exercises.tf_config_roles(lambda hosts: ...).state == "not yet"
    assert exercises.tf_config_roles(...).state == "not yet"


def with_first(role: str) -> Callable[[list[str]], dict[str, str]]:
    return lambda hosts: {host: role if host == hosts[0] else "worker" for host in hosts}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            lambda hosts: {host: "master" if host == "algo-2" else "worker" for host in hosts},
            "algo-1, at place 0",
        ),
        (lambda hosts: dict.fromkeys(hosts, "master"), "algo-2, at place 1, is a worker, not 'master'"),
        (with_first("chief"), "TensorFlow 2"),
        (with_first("ps"), "the script's own role"),
        (lambda hosts: {"algo-1": "master"}, "there is no role for algo-2"),
        (lambda hosts: with_first("master")([*hosts, "algo-0"]), "a role for algo-0, which is none of them"),
        (lambda hosts: ["master", "worker"], "which is list; it must be a dict"),
        (lambda hosts: {hosts[99]: "master"}, "IndexError"),
    ],
)
def test_wrong_roles_are_told_which_host_has_them(answer: Callable[[list[str]], Any], said: str) -> None:
    verdict = exercises.tf_config_roles(answer)
    assert (verdict.state, said in verdict.text) == ("wrong", True), verdict
