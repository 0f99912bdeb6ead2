"""What is read from a script's text: whether it is certain that GPUs would be idle."""

import pytest

from workshop_utils.jobs.imports import why_no_gpu

TRAINS = "import torch\nfrom workshop_utils import place\ntorch.nn.Linear(2, 2)\n"
HIDES = 'tf.config.set_visible_devices([], "GPU")\n'


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("import mpi4py.MPI, numpy, json\nfrom workshop_utils.comm.ring import ring_all_reduce", "imports nothing"),
        (TRAINS, "puts no tensor on a GPU"),
        (TRAINS + "torch.nn.parallel.DistributedDataParallel(model)", "puts no tensor on a GPU"),
        (TRAINS + "import horovod.torch as hvd\nx = torch.ones(2).to(torch.int64)", "puts no tensor on a GPU"),
        (TRAINS + "from workshop_utils.parallel.data import Overlapped", "puts no tensor on a GPU"),
    ],
)  # fmt: skip
def test_a_script_that_cannot_use_a_gpu_is_known_by_its_text(script, reason, make_job):
    assert reason in (why_no_gpu(make_job(script)) or "")


@pytest.mark.parametrize(
    "script",
    [
        TRAINS + "model.to(place.here().device)",
        TRAINS + "model.to(rank)",
        TRAINS + "model.cuda()",
        TRAINS + "model = torch.nn.DataParallel(model)",
        TRAINS + "from torch.nn import DataParallel as DP\nmodel = DP(model)",
        TRAINS + "from torch.distributed.fsdp import fully_shard",
        TRAINS + "import lightning",
        TRAINS + "from workshop_utils.comm import process_group",
        TRAINS + "from workshop_utils.comm.process_group import process_group",
        TRAINS + "model = torch.load('model.pt')",
        TRAINS + "model = torch.jit.load('model.pt')",
        TRAINS + "model = torch.hub.load('pytorch/vision', 'resnet18')",
        TRAINS + "from torch import load\nmodel = load('model.pt')",
        TRAINS + "import tensorflow",
        "import cupy",
        "import numpy, importlib\nimportlib.import_module('torch')",
        "import numpy, os\nos.execv('other', [])",
        "import numpy\n__import__('cupy')",
        "import tensorflow",
        f"import tensorflow as tf\nif options.cpu:\n    {HIDES}",
        f"import tensorflow as tf\ndef chief():\n    {HIDES}",
        f"import tensorflow as tf\ndef main():\n    if gpus:\n        return train()\n    {HIDES}",
        f"import tensorflow as tf\ndef main():\n    {HIDES}    if gpus:\n        tf.config.set_visible_devices(gpus)",
        f"import tensorflow as tf, jax\n{HIDES}",
        f"import tensorflow as tf, torch\n{HIDES}",
        "import numpy\nthis is no Python",
    ],
)
def test_a_script_that_may_use_a_gpu_is_not_suspected(script, make_job):
    assert why_no_gpu(make_job(script)) is None


def test_the_modules_beside_a_script_and_its_arguments_count_too(make_job):
    job = make_job("import torch, model")
    (job.folder / "model.py").write_text("import numpy\n")
    assert why_no_gpu(job) is not None
    assert why_no_gpu(job.replace(arguments={"where": "cuda:0"})) is None
    (job.folder / "model.py").write_text("import train\nDEVICE = 'cuda'\n")
    assert why_no_gpu(job) is None
