"""Bugs restated for spmd_types: which of them its checker rejects, which it accepts, and which it cannot be told."""

import pytest

from workshop_utils.lessons.gauntlet import types
from workshop_utils.lessons.gauntlet.planting import rows

pytestmark = pytest.mark.processes

BUGS = types.restatements()["bugs"]
PROGRAMS = types.restatements()["programs"]
# A factor keeps the placement; so do another order, another mask, another target of a message, and code for one rank.
MISSED = {
    "experts_times_their_group",
    "mean_over_the_sequence",
    "shards_summed",
    "balance_over_ranks",
    "tied_gradients_averaged",
    "ring_stops_before_home",
    "places_in_one_piece",
    "diagonal_by_ranks",
    "zig_zag_into_ulysses",
    "balance_on_the_first_rank",
    "first_token_of_each_part_is_foreign",
    "clipping_spares_the_second_copy_of_the_tied_weight",
}


def test_each_bug_is_restated_or_has_a_reason_why_not():
    assert [*BUGS] == [row.name for row in [*rows("bugs"), *rows("fresh")]]
    assert {row["program"] for row in BUGS.values() if "outside" not in row} == {*PROGRAMS}


@pytest.mark.parametrize("name", BUGS)
def test_the_checker_catches_what_it_caught(name):
    expected = "outside" if "outside" in BUGS[name] else "missed" if name in MISSED else "caught"
    assert types.verdict(name) == expected


def test_a_rejection_says_what_is_wrong():
    _, wrong = types.source("norm_of_a_shard")
    reason = types.rejection(wrong, PROGRAMS["shards"]["axes"])
    assert "Partial type on axis mesh_data cannot propagate through non-linear ops" in reason


def test_an_error_in_a_program_is_no_rejection():
    with pytest.raises(RuntimeError, match="size of tensor"):
        types.rejection("tensor(4, 8, data=S(0)) + tensor(4, 7, data=S(0))", ["data"])
    assert types.rejection("tensor(4, 8, data=S(0)) + tensor(8)", ["data"]) is None  # the ranks are gone, too


def test_what_is_outside_has_no_source():
    with pytest.raises(ValueError, match="seeds"):
        types.source("masks_differ_in_a_layer")
    with pytest.raises(KeyError):
        types.verdict("no_such_bug")
