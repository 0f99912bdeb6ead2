"""Figures to play with: each is drawn offline, says in words what it shows, and is small."""

import base64
import json

import pytest

from workshop_utils.plots import playable

NAMES = sorted(path.stem for path in playable.FOLDER.glob("*.json"))
MOST_NBYTES = 10_000  # of a specification


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_has_a_picture_words_and_labelled_sliders(name):
    data, about = playable.figure(name)._repr_mimebundle_()
    specification = data[playable.SPECIFICATION]
    assert set(data) == {playable.SPECIFICATION, "image/png", "text/plain"}  # never text/html
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert len(about["image/png"]["alt"]) > 60
    assert len(json.dumps(specification)) < MOST_NBYTES
    sliders = [parameter["bind"] for parameter in specification["params"] if "bind" in parameter]
    assert sliders
    assert all(slider["name"].strip() for slider in sliders)
    assert specification["$schema"].endswith("vega-lite/v5.json")


def test_an_unknown_figure_names_those_there_are():
    with pytest.raises(ValueError, match="no figure 'nothing'"):
        playable.figure("nothing")


def test_no_text_of_a_figure_ends_or_hides_its_script():
    page = playable.html({"title": "</script><!--<script>"}, "words", "here")
    assert page.count("<script>") == page.count("</script>") == 1
    assert "<!--" not in page
    source = page.partition('vegaEmbed("#here", ')[2].partition(", {actions")[0]
    assert json.loads(source) == {"title": "</script><!--<script>"}


def evaluated(expression, **names):
    """A Vega expression of numbers, `max` and conditions, in Python."""

    def in_python(text):
        condition, is_conditional, branches = text.partition(" ? ")
        then, _, otherwise = branches.partition(" : ")
        return f"({then} if {condition} else {in_python(otherwise)})" if is_conditional else text

    return eval(in_python(expression.replace("datum.", "")), names)


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (8, 1), (8, 4), (3, 8), (32, 32)])
def test_a_step_with_servers_is_computing_and_each_way_over_the_busiest_link(workers, servers):
    (above, below) = playable.figure("server").specification["vconcat"]
    nbytes, goodput, seconds = 100e6, 10e9 / 8, 0.5
    expected = seconds + 2 * nbytes / goodput * max(workers / servers, 1)
    values = {"c": seconds, "K": nbytes / 1e6, "B": goodput * 8 / 1e9, "k": servers}
    step = evaluated(above["transform"][0]["calculate"], workers=workers, **values)
    one_way = evaluated(below["transform"][0]["calculate"], W=workers, **values)
    assert step == pytest.approx(expected)
    assert seconds + 2 * one_way == pytest.approx(expected)
    bars = {
        "compute": (0, seconds),
        "push": (seconds, seconds + one_way),
        "pull": (seconds + one_way, expected),
    }
    for part, (start, end) in bars.items():
        datum = {"part": part, "way": one_way, "c": seconds}
        for transform in below["transform"][1:3]:
            datum[transform["as"]] = evaluated(transform["calculate"], **datum)
        assert (datum["start"], datum["end"]) == pytest.approx((start, end))


def test_the_player_s_own_names_are_hidden_from_other_scripts_of_a_page():
    assert playable.player().startswith("(() => {")
    assert playable.player().endswith("})();")


@pytest.mark.parametrize(
    ("buckets", "goodput", "latency"), [(1, 10, 50), (4, 10, 50), (100, 8, 100), (7, 50, 0)]
)
def test_all_reduces_of_buckets_wait_for_their_bucket_and_for_the_one_before(buckets, goodput, latency):
    (above, below) = playable.figure("buckets").specification["vconcat"]
    backward = 120
    settings = {"t": backward, "B": goodput, "latency": latency, "chosen": buckets}
    seconds = 2 * 7 * latency / 1e6 + 2 * 7 / 8 * (100e6 / buckets) / (goodput * 1e9 / 8)
    end = 0.0
    for bucket in range(1, buckets + 1):
        start = max(bucket / buckets * backward, end)
        end = start + 1000 * seconds
        row = {"i": bucket}
        for transform in below["transform"][1:]:
            row[transform["as"]] = evaluated(transform["calculate"], **settings, **row)
        assert (row["start"], row["end"]) == pytest.approx((start, end))
    point = {"m": buckets}
    for transform in above["transform"]:
        point[transform["as"]] = evaluated(transform["calculate"], **settings, **point)
    assert point["exposed"] == pytest.approx(end - backward)
