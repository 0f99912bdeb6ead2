"""What a rank speaks through, initialised as its framework wants it, and left when its work is done.

    with process_group("torch") as dist:
        dist.all_reduce(gradient)

It travels with every job, so that a function from a notebook finds the same on each target.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from workshop_utils import place
from workshop_utils.training.tf_cluster import leave_last

# Read by TensorFlow when it is imported, so import this module first: no notices, and no oneDNN, which sums in another
# order.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

# PyTorch's groups until the process ends. In PyTorch 2.6 a destructor of gloo's holds the interpreter's lock
# and waits for a thread, which may want that lock to let go of its last tensor.
_left: list[Any] = []


@contextlib.contextmanager
def process_group(framework: str | None = None) -> Iterator[Any]:
    """This process as a rank of the run that launched it.

    Yields:
        For `framework` None a Communicator: over the workshop's own links, or, where the run was launched for PyTorch,
        over its process group; for "torch" the module `torch.distributed` with a process group: over gloo, or
        over NCCL for tensors on this process's GPU, which is then PyTorch's current device; for "horovod"
        the module `horovod.torch` (or `horovod.tensorflow`, where TensorFlow is imported already) after `init()`; for
        "tensorflow" a `MultiWorkerMirroredStrategy`.

    Raises:
        ValueError: for None and "torch", if the process was not launched by such a strategy. Horovod and TensorFlow
            then make a group of this process alone.
    """
    if framework is None and "WORKSHOP_SECRET" in os.environ:
        from workshop_utils.comm import tcp

        with tcp.connect(*place.rendezvous()) as communicator:
            yield communicator
    elif framework is None:
        from workshop_utils.comm.over_torch import TorchCommunicator

        with _torch_group("gloo"), TorchCommunicator() as communicator:  # its arrays are NumPy's
            yield communicator
    elif framework == "torch":
        import torch  # before `place` looks for GPUs

        here = place.here()
        if here.backend == "nccl":
            torch.cuda.set_device(here.device)
        # A program may also send tensors on the CPU, which NCCL does not take.
        with _torch_group("cpu:gloo,cuda:nccl" if here.backend == "nccl" else "gloo") as distributed:
            yield distributed
    elif framework == "tensorflow":
        import tensorflow as tf

        tf.get_logger().setLevel("ERROR")
        place.tf_config()
        experimental = tf.distribute.experimental
        ring = experimental.CommunicationOptions(implementation=experimental.CommunicationImplementation.RING)
        yield tf.distribute.MultiWorkerMirroredStrategy(communication_options=ring)
        leave_last()
    else:
        hvd = importlib.import_module(f"horovod.{'tensorflow' if 'tensorflow' in sys.modules else 'torch'}")
        hvd.init()
        yield hvd
        hvd.shutdown()


@contextlib.contextmanager
def _torch_group(backend: str) -> Iterator[Any]:
    """`torch.distributed` with a process group of this `backend`."""
    # Functions of `nn` keep the group that they find when it is imported, and with it the group's threads.
    from torch import distributed
    from torch.distributed import nn as nn

    distributed.init_process_group(backend)
    yield distributed
    # Once all have met again, gloo's threads hold no tensor any more; otherwise a rank may abort as it leaves.
    if distributed.is_initialized():  # a program may have left by itself, as scripts do
        distributed.barrier()
        _left.extend(distributed.distributed_c10d._world.pg_map)
        distributed.destroy_process_group()


def run(program: Callable[..., Any], framework: str | None) -> None:
    """The main function of a script that `TrainingJob.from_function` has written: `program(group, **arguments)`."""
    here = place.here()
    # -k value, --key value: argparse would take a value such as -1e-05 for an option.
    names = [word.lstrip("-") for word in sys.argv[1::2]]
    arguments = dict(zip(names, map(place.argument, sys.argv[2::2]), strict=True))
    with process_group(framework) as group:
        value = program(group, **arguments)
        if value is not None:
            # In one piece: where ranks share an output, another's line may follow at any time.
            print(f"rank {here.rank} returned {value!r}\n", end="", flush=True)
