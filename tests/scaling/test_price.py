"""What machines cost, from a dated table that can be replaced."""

import pytest

from workshop_utils.scaling.catalogue import CatalogueError, instance, instances
from workshop_utils.scaling.price import DATED, PriceError, price


def test_a_run_costs_its_machines_for_its_hours() -> None:
    assert price(instance("p5.48xlarge"), 16, 61.5) == pytest.approx(16 * 61.5 * 55.04)
    assert price(instance("p5.48xlarge"), 16, 61.5, discount=0.25) == pytest.approx(0.75 * 16 * 61.5 * 55.04)


def test_a_machine_is_billed_for_a_minute_at_least() -> None:
    assert price(instance("g5.xlarge"), 1, 0.001) == pytest.approx(1.006 / 60)


def test_a_price_that_is_not_known_is_not_made_up() -> None:
    with pytest.raises(
        PriceError, match=r"trn2\.48xlarge: no price to rely on is known; give one as dollars_an_hour"
    ):
        price(instance("trn2.48xlarge"), 1, 1)


@pytest.mark.parametrize("discount", [-0.1, 1, float("nan")])
def test_a_discount_that_cannot_be_is_refused(discount: float) -> None:
    with pytest.raises(PriceError, match="it must be at least 0 and less than 1"):
        price(instance("g5.xlarge"), 1, 1, discount)


def test_the_text_of_a_price_says_from_when_it_is_and_that_it_was_not_checked() -> None:
    assert "us-east-1" in DATED
    assert "2026-07" in DATED
    assert "not checked" in DATED


def test_a_file_replaces_a_price_and_adds_a_machine(tmp_path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "p5.48xlarge: {dollars_an_hour: 30}\n"
        "cupboard: {accelerator: RTX 4090, accelerators: 2, memory: 24GB, memory_bandwidth: 1008GB,\n"
        "  flops_per_second: {bfloat16: 165.0e12}, inner: 200Gbit, network: 10Gbit, dollars_an_hour: 0.5}\n"
    )
    known = instances(file)
    assert price(known["p5.48xlarge"], 1, hours=1) == 30
    assert price(known["cupboard"], 2, hours=1) == 1
    assert known["p5.48xlarge"].accelerators == 8
    assert known["cupboard"].network_bytes_per_second == 1.25e9
    assert instances()["p5.48xlarge"].dollars_an_hour == 55.04


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("p5.48xlarge: {price: 30}", r"p5\.48xlarge\.price: there is no such field"),
        ("p5.48xlarge: {network: fast}", r"p5\.48xlarge\.network is 'fast': it must be a rate in bits"),
        ("p5.48xlarge: {dollars_an_hour: -1}", r"p5\.48xlarge\.dollars_an_hour is -1"),
        ("p5.48xlarge: {kernel_efficiency: 1.5}", r"kernel_efficiency is 1\.5: it must be at most 1"),
        ("mine: {accelerators: 2}", r"mine\.accelerator: it is missing"),
        ("mine: 3", "mine must have fields"),
    ],
)
def test_a_machine_that_is_badly_described_is_named_with_its_field(tmp_path, line, message) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(line)
    with pytest.raises(CatalogueError, match=message):
        instances(file)


def test_all_machines_of_the_catalogue_say_where_their_figures_are_from() -> None:
    for each in instances().values():
        assert each.source
        assert set(each.flops_per_second) == {"bfloat16", "float32"}
