"""The checks of lesson 11 agree with what the lesson is about; which wrong answers they know is among the guards."""

from __future__ import annotations

from workshop_utils.exercises import sagemaker as exercises
from workshop_utils.launchers.sagemaker import contract, prices
from workshop_utils.launchers.sagemaker.hosts import host_names


def test_the_numbers_are_those_of_the_contract_and_of_the_price_table() -> None:
    cluster = contract.parameter_server_cluster(host_names(5))
    assert exercises.processes_of_five_hosts(sum(map(len, cluster.values()))).state == "right"
    dollars = 4 * prices.DOLLARS_AN_HOUR["ml.p3.2xlarge"] * 1.5
    assert exercises.most_dollars(dollars).state == "right"
    assert exercises.place_of_the_second_host(host_names(12).index("algo-2")).state == "right"


def test_the_toolkit_s_own_rule_is_right() -> None:
    def by_config(hosts: list[str]) -> dict[str, str]:
        return {host: contract.parameter_server_config(hosts, host)["task"]["type"] for host in hosts}

    assert exercises.tf_config_roles(by_config).state == "right"
    assert exercises.tf_config_roles(lambda hosts: ...).state == "not yet"
