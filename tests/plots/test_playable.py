"""Figures to play with: each is drawn offline, says in words what it shows, and is small."""

import base64
import json

import pytest

from workshop_utils.plots import playable

NAMES = sorted(path.stem for path in playable.FOLDER.glob("*.json"))
MOST_NBYTES = 60_000  # of a specification, a grid computed beforehand included


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
