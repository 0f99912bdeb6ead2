"""Collectives on tensors of PyTorch and TensorFlow."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from workshop_utils.comm import threads
from workshop_utils.comm.adapters import as_array, in_place
from workshop_utils.comm.communicator import Communicator
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.comm.tree import tree_all_reduce


def test_an_array_stays_itself() -> None:
    array = np.zeros(3)
    assert as_array(array) is array


def test_what_is_no_tensor_is_refused_by_its_type() -> None:
    with pytest.raises(TypeError, match="a list is neither a NumPy array nor a tensor"):
        as_array([1.0])


def test_a_collective_on_arrays_imports_no_framework() -> None:
    program = (
        "import sys, numpy, workshop_utils.comm.threads as threads, workshop_utils.comm.ring as ring\n"
        "threads.run(2, lambda communicator: ring.ring_all_reduce(communicator, numpy.zeros(3)))\n"
        "assert not {'torch', 'tensorflow', 'keras'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.slow
def test_a_torch_tensor_lends_its_own_memory() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(2, 3)
    as_array(tensor)[1, 2] = 5
    assert tensor[1, 2] == 5


@pytest.mark.slow
@pytest.mark.parametrize("all_reduce", [ring_all_reduce, tree_all_reduce])
def test_gradients_of_torch_parameters_are_reduced_where_they_are(all_reduce: Any) -> None:
    torch = pytest.importorskip("torch")

    def program(communicator: Communicator) -> Any:
        parameter = torch.nn.Parameter(torch.ones(2, 5))
        (parameter.sum() * communicator.rank).backward()
        at = parameter.grad.data_ptr()
        all_reduce(communicator, parameter.grad, "mean")
        all_reduce(communicator, parameter, "sum")  # also what requires a gradient
        assert parameter.grad.data_ptr() == at
        return parameter

    for parameter in threads.run(3, program):
        assert torch.equal(parameter.grad, torch.full((2, 5), 1.0))
        assert torch.equal(parameter.detach(), torch.full((2, 5), 3.0))


@pytest.mark.slow
def test_torch_tensors_that_numpy_cannot_see_are_refused_with_the_way_out() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"bfloat16.*tensor\.float\(\)"):
        as_array(torch.zeros(3, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"meta.*tensor\.cpu\(\)"):
        as_array(torch.zeros(3, device="meta"))
    with pytest.raises(ValueError, match="contiguous"):
        threads.run(
            2, lambda communicator: ring_all_reduce(communicator, torch.zeros(4, 4)[:, ::2], operation="sum")
        )


@pytest.mark.slow
def test_a_tensorflow_variable_is_assigned_what_was_reduced() -> None:
    tensorflow = pytest.importorskip("tensorflow")

    def program(communicator: Communicator) -> Any:
        variable = tensorflow.Variable(np.full((2, 3), float(communicator.rank), np.float32))
        ring_all_reduce(communicator, variable)
        return variable.numpy()

    for reduced in threads.run(3, program):
        np.testing.assert_array_equal(reduced, np.full((2, 3), 3.0))


@pytest.mark.slow
def test_a_tensorflow_variable_is_left_alone_by_a_collective_that_fails() -> None:
    tensorflow = pytest.importorskip("tensorflow")
    variable = tensorflow.Variable([1.0, 2.0])

    def interrupted() -> None:
        with in_place(variable) as array:
            array[:] = 0
            raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        interrupted()
    assert variable.numpy().tolist() == [1.0, 2.0]


@pytest.mark.slow
def test_tensorflow_tensors_are_seen_without_a_copy_and_never_changed() -> None:
    tensorflow = pytest.importorskip("tensorflow")
    keras = pytest.importorskip("keras")
    tensor, variable = tensorflow.constant([1.0, 2.0]), tensorflow.Variable([1.0, 2.0])
    for given in (tensor, variable, keras.Variable([1.0, 2.0])):
        assert np.shares_memory(as_array(given), as_array(given))
        assert not as_array(given).flags.writeable
    with pytest.raises(TypeError, match=r"cannot change; give a tf\.Variable"):
        threads.run(2, lambda communicator: ring_all_reduce(communicator, tensor))
