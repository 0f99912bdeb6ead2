"""One folder is the same folder on every target: files, working directory, command line, data, model folder."""

import hashlib
import json
from functools import partial

import pytest
import slurm_cluster
from slurm_cluster import SlurmCluster

from workshop_utils.launchers.kubernetes import EmulatedKubernetes
from workshop_utils.launchers.local import Local
from workshop_utils.launchers.sagemaker import EmulatedSageMaker
from workshop_utils.launchers.slurm import Slurm

pytestmark = pytest.mark.processes

PATIENCE_SECONDS = 240.0
SCRIPT = """
    import hashlib, json, os, sys
    from pathlib import Path
    import numpy
    import checkpoints
    from lib.model import NAME
    from workshop_utils import place

    here, data = place.here(), Path(os.environ["WORKSHOP_DATA"])
    Path("logs").mkdir(exist_ok=True)
    Path("logs", f"rank-{here.rank}").write_text("written")
    Path(os.environ["WORKSHOP_MODEL"], f"rank-{here.rank}").write_text("saved")
    files = {
        str(path): hashlib.md5(path.read_bytes()).hexdigest()
        for path in Path().rglob("*")
        if path.is_file() and not {"__pycache__", "workshop_utils", "logs"} & {*path.parts}
    }
    channels = {
        name: {path.name: path.read_text() for path in Path(os.environ[f"SM_CHANNEL_{variable}"]).iterdir()}
        for name in os.environ["NAMES"].split()
        for variable in [name.upper().replace("-", "_")]
    }
    saw = {
        "rank": here.rank,
        "words": sys.argv[1:],
        "own": [checkpoints.OWN, NAME, Path("settings.yaml").read_text()],
        "files": files,
        "channels": [*channels.values()],
        "in data": [(data / name).is_dir() for name in channels],
        "script": [__name__, Path(__file__).name, Path(__file__).resolve().parent == Path.cwd()],
    }
    print("SAW", json.dumps(saw), flush=True)
"""
WORDS = [
    3,
    "--amp",
    "at={rank}/{world_size}",
    "{x}",
    '{"lr": [0.1, "a b"]}',
    'it\'s "$HOME"\n`x` \\',
    "",
    "-5",
    "ü*",
]


@pytest.fixture
def job(make_job, tmp_path):
    """`job(**fields)` is the folder as a job of two ranks, with two channels: a file and a folder."""
    channels = tmp_path / "channels"
    (channels / "folder").mkdir(parents=True)
    (channels / "corpus.txt").write_text("to be")
    (channels / "folder" / "more.txt").write_text("or not")

    def described(names="train my-test", **fields):
        data = dict(zip(names.split(), [str(channels / "corpus.txt"), str(channels / "folder")], strict=True))
        common = {"workers": 2, "arguments": WORDS, "data": data, "environment": {"NAMES": names}}
        made = make_job(SCRIPT, **{**common, **fields})
        (made.folder / "lib").mkdir()
        (made.folder / "lib" / "__init__.py").touch()
        (made.folder / "lib" / "model.py").write_text("from .names import NAME")
        (made.folder / "lib" / "names.py").write_text("NAME = 'mine'")
        (made.folder / "settings.yaml").write_text("rate: 1\n")
        (made.folder / "weights.bin").write_bytes(bytes(range(256)))
        (made.folder / "checkpoints.py").write_text("OWN = 'not the workshop\\'s'")
        return made

    return described


TARGETS = {
    "local": (Local, {"strategy": "torch_ddp"}),
    "local, under mpirun": (Local, {"strategy": "mpi"}),
    "local, warm": (partial(Local, warm=True), {"strategy": "ring"}),
    "sagemaker-local, by torchrun's driver": (EmulatedSageMaker, {"strategy": "torch_ddp"}),
    "sagemaker-local, by the script's driver": (EmulatedSageMaker, {"workers": 1}),
    "sagemaker-local, by the toolkit": (EmulatedSageMaker, {"strategy": "multi_worker_mirrored"}),
    "sagemaker-local, by the toolkit's mpirun": (EmulatedSageMaker, {"strategy": "mpi"}),
    "kubernetes-local, Job": (partial(EmulatedKubernetes, kind="Job"), {"workers": 1}),
    "kubernetes-local, PyTorchJob": (partial(EmulatedKubernetes, kind="PyTorchJob"), {"strategy": "torch_ddp"}),
    "kubernetes-local, TFJob": (partial(EmulatedKubernetes, kind="TFJob"), {"strategy": "multi_worker_mirrored"}),
    "kubernetes-local, TrainJob": (
        partial(EmulatedKubernetes, kind="TrainJob"),
        {"strategy": "torch_ddp", "nodes": 1, "processes_per_node": 2},
    ),
    "kubernetes-local, MPIJob": (partial(EmulatedKubernetes, kind="MPIJob"), {"strategy": "mpi"}),
}  # fmt: skip


def seen(launcher, job):
    """What the ranks of `job` saw, by rank."""
    with launcher.launch(job) as run:
        run.wait(PATIENCE_SECONDS)
        lines = [line.text for line in run.logs() if line.text.startswith("SAW ")]
    return sorted((json.loads(line.removeprefix("SAW ")) for line in lines), key=lambda each: each["rank"])


def to_be_seen(job):
    """What the ranks of `job` must see."""
    files = {
        str(path.relative_to(job.folder)): hashlib.md5(path.read_bytes()).hexdigest()
        for path in job.folder.rglob("*")
        if path.is_file() and not {"__pycache__", "logs"} & {*path.parts}
    }
    same = {
        "own": ["not the workshop's", "mine", "rate: 1\n"],
        "files": files,
        "channels": [{"corpus.txt": "to be"}, {"more.txt": "or not"}],
        "in data": [True, True],
        "script": ["__main__", "train.py", True],
    }
    words = [
        [str(word).replace("{rank}/{world_size}", f"{rank}/{job.workers}") for word in WORDS]
        for rank in range(job.workers)
    ]
    return [{"rank": rank, "words": words[rank], **same} for rank in range(job.workers)]


@pytest.mark.parametrize("target", TARGETS)
def test_a_script_sees_the_same_wherever_it_runs(target, job, nothing_is_left):
    make, fields = TARGETS[target]
    names = {"names": "train my_test"} if target.startswith("sagemaker") else {}  # which refuses a '-'
    described = job(**names, **fields)
    assert seen(make(), described) == to_be_seen(described)
    is_here = target.startswith("local")
    assert (described.folder / "logs").exists() is is_here  # elsewhere a script writes into a copy


@pytest.mark.skipif(not slurm_cluster.is_installed(), reason="Slurm's daemons are not here")
def test_a_script_sees_the_same_on_slurm(job, tmp_path, monkeypatch):
    with SlurmCluster() as cluster:
        monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
        monkeypatch.setenv("PATH", slurm_cluster.SEARCHED)
        for strategy in ("torch_ddp", "mpi"):
            described = job(strategy=strategy)
            assert seen(Slurm(folder=tmp_path / "shared", interface="lo"), described) == to_be_seen(described)
            assert not (described.folder / "logs").exists()
