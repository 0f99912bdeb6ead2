"""Between real processes, data parallel and sharded training are exact."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import test_data_parallel
import test_sharded
import torch
from parallel_training import OPTIMIZERS, by_one_process, made

from workshop_utils.comm.communicator import Communicator
from workshop_utils.comm.ring import ring_all_reduce


def program(communicator: Communicator) -> dict[str, np.ndarray]:
    """The parameters after each way of training."""
    kind, options = OPTIMIZERS["AdamW"]
    torch.set_num_threads(1)
    found = {
        form: test_data_parallel.trained(communicator, form, "tied", "AdamW")
        for form in ("naive", "overlapped")
    }
    for stage in test_sharded.STAGES:
        found[f"stage {stage}"] = test_sharded.trained(communicator, stage, "tied", kind, **options)
    return {way: parameters.numpy() for way, parameters in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("size", [3])
def test_every_way_between_processes_equals_one_process(ranks: Any, size: int) -> None:
    expected = by_one_process(made("tied"), "AdamW", size)
    for found in ranks.run("tcp", size, program):
        assert len(found) == 5
        for way, parameters in found.items():
            np.testing.assert_allclose(parameters, expected, rtol=0, atol=1e-12, err_msg=way)


def is_let_go(communicator: Communicator) -> bool:
    array = np.ones(100_000, np.float32)
    memory = weakref.ref(array)
    ring_all_reduce(communicator, array)
    communicator.barrier()
    del array
    return memory() is None


@pytest.mark.slow
def test_a_communicator_does_not_keep_the_last_array(ranks: Any) -> None:
    assert ranks.run("tcp", 2, is_let_go) == [True, True]
