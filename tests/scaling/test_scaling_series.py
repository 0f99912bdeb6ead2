"""The published series of throughput over machines, as they were carried over."""

import pandas as pd
import pytest

from workshop_utils.scaling.layers import layers
from workshop_utils.scaling.published import published_table


def series():
    return published_table("scaling_series").groupby("series", sort=False)


def test_efficiencies_are_against_one_device_of_the_same_series():
    for _, rows in series():
        single = rows["throughput"].iloc[0]
        if pd.notna(single):
            assert rows["devices"].iloc[0] == 1
            assert (rows["throughput"] / rows["devices"] / single).to_list() == pytest.approx(
                rows["efficiency"].to_list(), abs=6e-4
            )


def test_every_row_names_its_source_a_model_with_a_table_and_all_devices_of_its_machines():
    table = published_table("scaling_series")
    assert table["source"].notna().all()
    assert all(layers(model) for model in table["model"].unique())
    assert (table["machines"] * table["devices_a_machine"] == table["devices"]).all()
