"""PyTorch's tensors as NumPy arrays that share their memory, so that collectives take them as they are.

PyTorch is not imported here unless one of its tensors is given.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def as_array(tensor: Any) -> np.ndarray:
    """`tensor`, also a parameter or a gradient, as an array that shares its memory; an array is returned as it is.

    Raises:
        TypeError: if NumPy cannot see that memory, or has no such dtype; the message says what would do.
    """
    if isinstance(tensor, np.ndarray):
        return tensor
    if type(tensor).__module__.partition(".")[0] != "torch":
        raise TypeError(
            f"a {type(tensor).__name__} is neither a NumPy array nor a tensor of PyTorch; "
            "pass an array, such as numpy.array(...), and use it afterwards"
        )
    if tensor.device.type != "cpu":
        raise TypeError(f"the tensor is on {tensor.device}; move it to the CPU first: tensor.cpu()")
    try:
        array: np.ndarray = tensor.detach().numpy()
    except (TypeError, RuntimeError) as failure:  # such as bfloat16, or a sparse tensor
        raise TypeError(
            f"NumPy has no array like a {tensor.layout} tensor of {tensor.dtype}; convert it first, "
            "for example with tensor.float()"
        ) from failure
    return array
