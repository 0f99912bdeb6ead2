"""An array without contents, for when only the time of sending it matters."""

from __future__ import annotations

from typing import Any, Self

import numpy as np


class Shape(np.ndarray):
    """Takes the place of an array: it has dtype, shape, slices and arithmetic, but no contents, whatever its size.

    It is an array whose elements are all the same few bytes, so it takes no memory, and slices as fast as NumPy
    does; what is stored into it is dropped, and what would need contents raises TypeError.
    """

    flags = np.empty(0).flags  # it counts as contiguous

    def __new__(cls, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Self:
        dtype = np.dtype(dtype)
        dimensions = 1 if isinstance(shape, int) else len(shape)
        return super().__new__(cls, shape, dtype, bytes(dtype.itemsize), 0, (0,) * dimensions)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Nothing is stored."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = (), **_: Any) -> Any:
        if method != "__call__":
            raise TypeError(f"numpy.{ufunc.__name__}.{method} needs contents, which a Shape has not")
        if out:
            return out[0]
        shape = np.broadcast_shapes(*(getattr(value, "shape", ()) for value in inputs))
        return Shape(shape, np.result_type(*(getattr(value, "dtype", value) for value in inputs)))

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function in (np.empty_like, np.zeros_like, np.ones_like):
            like = args[0]
            return Shape(like.shape, kwargs.get("dtype") or like.dtype)
        raise TypeError(f"numpy.{function.__name__} needs contents, which a Shape has not")

    def copy(self, order: Any = "C") -> Shape:
        """Itself: there is nothing to copy."""
        return self

    def __repr__(self) -> str:
        return f"Shape({self.shape}, {self.dtype})"

    __str__ = __repr__
