"""What `workshop launch JOB --on TARGET --render` shows stays the same, for every job and every target.

`rendered/TARGET.txt` holds it, below the command line: what is sent, or the sentence that refuses. What differs between
machines and moments (paths, ports, random names) and how the package's own modules are called has a marker in its
place. When something is to change, write the files again and read the difference before committing it:

    GUARDS_UPDATE=1 python -m pytest tests/guards/test_rendered.py; git diff tests/guards/rendered

`options.txt` is about what a learner changes on the command line, and about jobs that have no folder of their own. To
add a command line there, write it as a title, and then the file again. PLACES are the place.yaml that it may name.

SageMaker's SDK reads its configuration for each job: of the jobs that it accepts, a few stand for all.
"""

import difflib
import os
from pathlib import Path

import pytest
import yaml
from adapter import ROOT, workshop
from normalised import rendering, without_accidents

HERE = Path(__file__).with_name("rendered")
# Each job.yaml by its folder, each description of another variant of its script by its file.
DESCRIPTIONS = {
    str(path.relative_to(ROOT / "jobs")).removesuffix("/job.yaml"): yaml.safe_load(path.read_text())
    for path in sorted((ROOT / "jobs").glob("*/*.yaml"))
    if path.name != "kubernetes.yaml" and (path.name == "job.yaml" or path.parent.name != "bert_pretraining")
}
STRATEGIES = {name: description.get("strategy", "single") for name, description in DESCRIPTIONS.items()}
JOBS = list(STRATEGIES)
FIRST = {strategy: name for name, strategy in reversed(STRATEGIES.items())}  # job of each strategy
FEW = {"digits_resumable", "mnist_torch_ddp", "gpt_fsdp/hsdp.yaml", "mnist_torch_ddp/single.yaml"}
MOST_LINES = 40  # of a difference, in a message
TITLE = "===== "


def sections(target):
    """By command line, what a file in `rendered/` holds."""
    parts = (HERE / f"{target}.txt").read_text(encoding="utf-8").split(TITLE)[1:]
    return {line: said.strip() for line, _, said in (part.partition("\n") for part in parts)}


def launches(target):
    """The command lines of a file in `rendered/`."""
    if target == "options":
        place = "--on kubernetes --config jobs/clusters/eks/place.yaml"
        of_strategies = (f"jobs/{name} {place}" for name in FIRST.values())
        return list(dict.fromkeys([*sections(target), *of_strategies]))
    config = " --config jobs/clusters/sagemaker/place.yaml" if target.startswith("sagemaker") else ""
    names = JOBS
    if target == "sagemaker":
        names = sorted({*FIRST.values(), *FEW})
    elif target.endswith("-local"):  # it shows what the target itself would be sent
        names = list(FIRST.values())
    return [f"jobs/{name} --on {target}{config}" for name in names]


ROLE = "role: arn:aws:iam::123456789012:role/workshop\nregion: us-east-1\n"
PLACES = {
    "KINDS": "kind: TrainJob\nnamespace: team-a\nnode_selector: {disk: ssd}\nimage: example.com/torch:1\n",
    "ELASTIC": "elastic: {min_workers: 1, max_workers: 3}\ngang: volcano\n",
    "GANG": "kind: TrainJob\ngang: volcano\nqueue: workshop\n",
    "CLAIM": "data_claim: all\n",
    "SLURM": "folder: /shared/my runs\nsetup: [module load cuda]\noptions: [--partition=gpu, --constraint=a100]\n",
    "STORED": ROLE,
    "TAGGED": f"{ROLE}instance_type: ml.c5.2xlarge\ntags: {{team: a}}\n",
    "SPOT": f"{ROLE}spot: true\nmax_wait: 1h\nbucket: my-own-bucket\ninput_mode: FastFile\nvolume_gb: 50\n",
}  # fmt: skip


@pytest.fixture
def answer(tmp_path, monkeypatch):
    """`answer(line)` is what `workshop launch LINE --render` says."""
    monkeypatch.chdir(ROOT)
    for name in ("PYTHONPATH", "PYTHONUNBUFFERED", "AWS_REGION", "AWS_DEFAULT_REGION", "WORKSHOP_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, text in PLACES.items():
        (tmp_path / f"{name}.yaml").write_text(text)

    def say(line):
        words = [str(tmp_path / f"{word}.yaml") if word in PLACES else word for word in line.split()]
        said = workshop("launch", *words, "--render")
        assert not said.traceback, f"workshop launch {line}:\n{said.traceback}"
        out, err = (text.replace(str(tmp_path), "TEST") for text in (said.out, said.err))
        if said.code == 0:
            return rendering(out).strip()
        assert (said.code, out) == (2, ""), f"workshop launch {line} ends with {said.code}: {err}"
        assert len(err.splitlines()) == 1, f"a refusal is one sentence, not:\n{err}"
        return without_accidents(err).strip()

    return say


TARGETS = (
    "local",
    "sagemaker",
    "sagemaker-local",
    "kubernetes",
    "kubernetes-local",
    "options",
)


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_rendered_stays_the_same(target, answer):
    place = target.removesuffix("-local")
    file = HERE / f"{place}.txt"
    now = {line.replace(target, place): answer(line) for line in launches(target)}
    if os.environ.get("GUARDS_UPDATE") and target == place:
        file.write_text("".join(f"{TITLE}{line}\n{said}\n\n" for line, said in now.items()), encoding="utf-8")
        pytest.fail(f"written: look at the difference with git diff {file.relative_to(ROOT)}")
    before = sections(place)
    if target != place:
        before = {line: said for line, said in before.items() if line in now}
    changed = [line for line in sorted({*before, *now}) if before.get(line) != now.get(line)]
    if changed:
        texts = [said.get(changed[0], "").splitlines() for said in (before, now)]
        difference = list(difflib.unified_diff(*texts, "kept", "now", lineterm="", n=2))[:MOST_LINES]
        pytest.fail("\n".join([f"{len(changed)} of {len(now)} differ:", *changed, *difference]))
