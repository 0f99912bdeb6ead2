"""Collectives on tensors of PyTorch."""

import subprocess
import sys

import pytest

from workshop_utils.comm import threads
from workshop_utils.comm.communicator import as_array
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.comm.tree import tree_all_reduce


def test_what_is_no_tensor_is_refused_by_its_type():
    with pytest.raises(TypeError, match="a list is neither a NumPy array nor a tensor of PyTorch"):
        threads.run(2, lambda communicator: ring_all_reduce(communicator, [1.0]))


@pytest.mark.processes
def test_a_collective_on_arrays_imports_no_framework():
    program = (
        "import sys, numpy, workshop_utils.comm.threads as threads, workshop_utils.comm.ring as ring\n"
        "threads.run(2, lambda communicator: ring.ring_all_reduce(communicator, numpy.zeros(3)))\n"
        "assert not {'torch', 'tensorflow', 'keras'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.processes
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("all_reduce", [ring_all_reduce, tree_all_reduce])
def test_gradients_of_torch_parameters_are_reduced_where_they_are(all_reduce, dtype):
    torch = pytest.importorskip("torch")

    def program(communicator):
        parameter = torch.nn.Parameter(torch.ones(2, 5, dtype=getattr(torch, dtype)))
        (parameter.sum() * communicator.rank).backward()
        at = parameter.grad.data_ptr()
        all_reduce(communicator, parameter.grad, "mean")
        all_reduce(communicator, parameter, "sum")  # also what requires a gradient
        assert parameter.grad.data_ptr() == at
        return parameter

    for parameter in threads.run(3, program):
        assert torch.equal(parameter.grad, torch.full((2, 5), 1.0, dtype=parameter.dtype))
        assert torch.equal(parameter.detach(), torch.full((2, 5), 3.0, dtype=parameter.dtype))


@pytest.mark.processes
def test_torch_tensors_that_numpy_cannot_see_are_refused_with_the_way_out():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"bfloat16.*tensor\.float\(\)"):
        as_array(torch.zeros(3, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"meta.*tensor\.cpu\(\)"):
        as_array(torch.zeros(3, device="meta"))
    with pytest.raises(ValueError, match="contiguous"):
        threads.run(
            2, lambda communicator: ring_all_reduce(communicator, torch.zeros(4, 4)[:, ::2], operation="sum")
        )
