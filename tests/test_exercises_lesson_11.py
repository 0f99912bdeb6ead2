"""The checks of lesson 11."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from workshop_utils.exercises import sagemaker as exercises
from workshop_utils.launchers.sagemaker import contract, prices
from workshop_utils.launchers.sagemaker.hosts import host_names


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        (exercises.processes_of_five_hosts, 10, 5),
        (exercises.most_dollars, 22.95, 15.3),
        (exercises.place_of_the_second_host, 4, 1),
    ],
)
def test_numbers_are_told_right_from_wrong(check: Callable[[Any], Any], right: float, wrong: float) -> None:
    assert check(right).state == "right"
    assert check(wrong).state == "wrong"
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
    by_number = exercises.tf_config_roles(
        lambda hosts: {host: "master" if host == "algo-2" else "worker" for host in hosts}
    )
    assert (by_number.state, "algo-1 is a master" in by_number.text) == ("wrong", True)
    assert "a role for each" in exercises.tf_config_roles(lambda hosts: {"algo-1": "master"}).text
    assert exercises.tf_config_roles(lambda hosts: ...).state == "not yet"
