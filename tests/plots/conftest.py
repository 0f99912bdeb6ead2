"""What tests of figures share: nothing opens a window, and no figure is left."""

import matplotlib
import pytest
from matplotlib import pyplot as plt

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def _no_figure_is_left():
    yield
    plt.close("all")
