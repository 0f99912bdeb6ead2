"""The drawings in `images/` can be read by everybody and edited by hand."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
IMAGES = sorted((ROOT / "images").iterdir())
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_a_drawing_is_light_and_described_and_its_text_is_text_on_a_white_page(image):
    root = ElementTree.parse(image).getroot()
    assert root.findtext(f"{SVG}title")
    assert root.findtext(f"{SVG}desc").endswith(".")
    assert len(root.findall(f".//{SVG}text")) >= 8
    assert image.stat().st_size < 25_000
    page = next(root.iter(f"{SVG}rect"))
    assert (page.get("width"), page.get("height"), page.get("fill")) == ("100%", "100%", "white")


def test_a_lesson_shows_every_drawing():
    shown = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert [image.name for image in IMAGES if f"../images/{image.name}" not in shown] == []
