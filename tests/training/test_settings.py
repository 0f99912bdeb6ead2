"""Settings of a notebook's libraries on a rank; those of PyTorch, NumPy and pandas are in `ranks/test_cell`."""

import subprocess
import sys

import pytest

from workshop_utils.training import settings

pytestmark = pytest.mark.processes

LATER = """
import pickle, sys
from workshop_utils.training import settings
settings.apply(pickle.loads(bytes.fromhex(sys.argv[1])))
import importlib.util
assert importlib.util.find_spec("matplotlib")
import matplotlib
print(matplotlib.rcParams["figure.dpi"])
"""


def test_settings_of_keras_are_set_anew():
    import keras

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        gathered = settings.gathered()
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
    settings.apply({"keras": gathered["keras"]})
    try:
        assert keras.config.floatx() == "float64"
        assert keras.config.dtype_policy().name == "mixed_bfloat16"
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


def test_a_library_is_set_once_it_is_imported():
    import pickle

    import matplotlib

    with matplotlib.rc_context({"figure.dpi": 77}):
        gathered = pickle.dumps(settings.gathered()).hex()
    done = subprocess.run([sys.executable, "-c", LATER, gathered], capture_output=True, text=True, check=True)
    assert done.stdout == "77.0\n"
