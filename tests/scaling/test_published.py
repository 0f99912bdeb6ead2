"""Published figures as they were carried over, and how far predictions of them are off."""

import numpy as np
import pandas as pd
import pytest

from workshop_utils.comm.topology import Link
from workshop_utils.scaling import published, validation
from workshop_utils.scaling.cost import all_reduce_seconds
from workshop_utils.scaling.fit import PIPELINE_NBYTES, path_terms, size_terms


@pytest.mark.parametrize(
    ("values", "three"),
    # Of two values in the middle, the smaller one counts.
    [([1, 8, 16, 32, 64], [1, 8, 64]), ([2.0**power for power in range(16, 32)], [2**16, 2**23, 2**31])],
)
def test_the_three_points_are_the_ends_and_the_middle_of_the_logarithms(values, three):
    assert [values[index] for index in validation.fitted_points(values)] == three
    with pytest.raises(ValueError, match="at least three, ascending"):
        validation.fitted_points(three[::-1])


def test_what_was_left_out_does_not_change_what_is_predicted():
    curves = published.published_curves()
    before = validation.predict_curve(curves[curves["system"] == curves["system"][0]])
    wrong = before["measured"].where(before["fitted"], 10 * before["measured"])
    after = validation.predict_curve(before.assign(measured=wrong))
    assert after["predicted"].equals(before["predicted"])
    assert (after.loc[~after["fitted"], "measured"] > before.loc[~before["fitted"], "measured"]).all()
    assert before["fitted"].sum() == 3


def test_published_curves_are_predicted_within_a_tenth_and_better_than_by_a_plain_line():
    scores = validation.scores(validation.published_predictions())
    line = validation.scores(validation.published_predictions(by_size=size_terms()[:2]))
    assert scores["points"]["all"] == 51  # without arrays below 64 KB
    assert scores["error"]["all"] <= 0.10
    assert line["error"]["all"] > 1.5 * scores["error"]["all"]
    assert all(validation.reason(system) for system in scores.index if system != "all")


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_the_result_does_not_hang_on_the_one_constant(factor):
    terms = size_terms(factor * PIPELINE_NBYTES)
    assert validation.scores(validation.published_predictions(by_size=terms))["error"]["all"] <= 0.10


def test_hardware_facts_alone_predict_nccl_s_curves_within_a_quarter():
    scores = validation.scores(validation.hardware_predictions())
    assert scores["points"]["all"] == 54
    assert scores["error"]["all"] <= 0.25


def test_figures_of_which_there_are_too_few_to_fit_are_shown_with_misses():
    others = validation.other_predictions()
    assert len(others) == 10
    assert (others["predicted_low"] <= others["predicted_high"] + 1e-12).all()
    assert others["why"].str.startswith("missed").sum() == 5


def test_own_measurements_are_predicted_from_those_that_the_fit_may_see():
    def ring(size, nbytes, path):
        return all_reduce_seconds("ring", size, nbytes, path)

    workers, nbytes = np.repeat([2, 3, 4], 3), np.tile([1e5, 1e6, 1e7], 3)
    seconds = ring(workers, nbytes, Link(1e-3, 1e7)) * np.where(workers == 3, 1.5, 1)  # not seen by the fit
    table = pd.DataFrame({"workers": workers, "nbytes": nbytes, "seconds": seconds})
    arguments = table, path_terms(ring), ("workers", "nbytes")
    found = validation.own_predictions(*arguments, lambda rows: rows["workers"] != 3)
    assert validation.median_error(found) == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="all 9 rows are fitted"):
        validation.own_predictions(*arguments, lambda rows: rows["workers"] > 0)
