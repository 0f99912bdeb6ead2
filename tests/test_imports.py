"""What is read from a script's imports: whether it is certain that GPUs would be idle."""

import pytest

from workshop_utils.jobs.imports import why_no_gpu

CPU = "import mpi4py.MPI, numpy, json\nfrom workshop_utils.comm.ring import ring_all_reduce\n"


@pytest.mark.parametrize(
    "more",
    [
        "import torch",
        "import tensorflow",
        "import cupy",
        "from workshop_utils.comm import process_group",
        "from workshop_utils.comm.process_group import process_group",
        "import importlib\nimportlib.import_module('torch')",
        "import os\nos.execv('other', [])",
        "__import__('cupy')",
        "this is no Python",
    ],
)
def test_a_script_may_use_a_gpu_unless_it_imports_nothing_but_packages_for_cpus(more, make_job):
    assert why_no_gpu(make_job(CPU)) == "nothing that it imports can use one"
    assert why_no_gpu(make_job(CPU + more)) is None


def test_the_modules_beside_a_script_count_too(make_job):
    job = make_job("import numpy, model")
    (job.folder / "model.py").write_text("import train\nimport pandas\n")
    assert why_no_gpu(job) is not None
    (job.folder / "model.py").write_text("import train\nimport torch\n")
    assert why_no_gpu(job) is None
