"""PyTorch's and TensorFlow's tensors as NumPy arrays, so that collectives take them as they are.

| given | what a collective works on |
| --- | --- |
| a NumPy array | itself |
| a PyTorch tensor on the CPU, also a parameter or a gradient | its own memory |
| a TensorFlow or Keras variable | a copy, assigned back at the end: TensorFlow lends its memory for reading only |
| a TensorFlow tensor | refused: such a tensor cannot change |

No framework is imported here unless one of its tensors is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


def as_array(tensor: Any) -> np.ndarray:
    """`tensor` as an array that shares its memory; TensorFlow's is for reading only.

    Raises:
        TypeError: if NumPy cannot see that memory, or has no such dtype; the message says what would do.
    """
    if isinstance(tensor, np.ndarray):
        return tensor
    framework = _framework(tensor)
    if framework == "torch":
        return _torch_array(tensor)
    if framework == "keras":
        return as_array(tensor.value)
    if framework == "tensorflow":
        return np.asarray(memoryview(tensor.value() if hasattr(tensor, "assign") else tensor))
    raise TypeError(
        f"a {type(tensor).__name__} is neither a NumPy array nor a tensor of PyTorch or TensorFlow"
    )


@contextmanager
def in_place(tensor: Any) -> Iterator[Any]:
    """`tensor` as an array whose changes are the tensor's own once the block has ended without an error.

    What is neither a tensor of PyTorch nor of TensorFlow is given back as it is.

    Raises:
        TypeError: if the tensor cannot change, or its memory cannot be reached; the message says what would do.
    """
    framework = _framework(tensor)
    if framework == "torch":
        yield _torch_array(tensor)
    elif framework in ("tensorflow", "keras"):
        if not hasattr(tensor, "assign"):
            raise TypeError(
                "a TensorFlow tensor cannot change; give a tf.Variable, or a copy: numpy.array(tensor)"
            )
        array = np.array(tensor.numpy())
        yield array
        tensor.assign(array)
    else:
        yield tensor


def _framework(tensor: Any) -> str:
    return type(tensor).__module__.partition(".")[0]


def _torch_array(tensor: Any) -> np.ndarray:
    if tensor.device.type != "cpu":
        raise TypeError(f"the tensor is on {tensor.device}; move it to the CPU first: tensor.cpu()")
    try:
        return tensor.detach().numpy()
    except (TypeError, RuntimeError) as failure:  # such as bfloat16, or a sparse tensor
        raise TypeError(
            f"NumPy has no array like a {tensor.layout} tensor of {tensor.dtype}; convert it first, "
            "for example with tensor.float()"
        ) from failure
