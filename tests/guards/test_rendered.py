"""What `workshop launch JOB --on TARGET --render` shows stays the same, for every job and every target.

`rendered/TARGET.yaml` holds it: what is sent, by job, or the sentence that refuses, with the jobs that it refuses. What
differs between machines and moments (paths, ports, random names) and how the package's own modules are called has a
marker in its place. When something is to change, write the files again and read the difference before committing it:

    GUARDS_UPDATE=1 python -m pytest tests/guards/test_rendered.py; git diff tests/guards/rendered

TorchX renders in an environment of its own, which takes seconds a job: of the jobs that it accepts, a few stand for
all.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from adapter import ROOT, workshop
from normalised import rendering, without_accidents

HERE = Path(__file__).with_name("rendered")
SAGEMAKER = ("--config", "jobs/clusters/sagemaker/place.yaml")
TRAINIUM = ("--config", "jobs/bert_pretraining/trainium/place.yaml")
JOBS = [path.parent.name for path in sorted((ROOT / "jobs").glob("*/job.yaml"))]
STRATEGIES = {
    name: yaml.safe_load((ROOT / "jobs" / name / "job.yaml").read_text()).get("strategy", "single")
    for name in JOBS
}
FIRST_OF_EACH_STRATEGY = {strategy: name for name, strategy in reversed(STRATEGIES.items())}
ON_TORCHX = {"digits_fsdp", "digits_resumable", "mnist_single", "mnist_torch_ddp"}
MOST_LINES = 40  # of a difference, in a message


def launches(target: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The command lines of a file in `rendered/`, each with the name under which its answer is kept there."""
    for name in JOBS:
        job = f"jobs/{name}"
        if target in ("sagemaker", "sagemaker-stand-in"):
            yield name, (job, "--on", target, *SAGEMAKER)
        elif target == "torchx":
            if name in ON_TORCHX or STRATEGIES[name] not in ("single", "torch_ddp"):
                yield name, (job, "--on", target)
        elif target != "options":
            yield name, (job, "--on", target)
    if target == "options":
        for line in OPTIONS:
            yield line, tuple(line.split())
        for name in FIRST_OF_EACH_STRATEGY.values():
            for place in (
                "--on kubernetes --config jobs/clusters/eks/place.yaml",
                "--on spark --config SPARK",
            ):
                line = f"jobs/{name} {place}"
                yield line, tuple(line.split())


# What a learner changes on the command line, and the jobs that have no folder of their own.
OPTIONS = (
    "jobs/mnist_torch_ddp --workers 3 -a epochs=7 -a learning-rate=0.5 --timeout 90s",
    "jobs/mnist_torch_ddp --output models",
    "jobs/mnist_horovod --workers 1",
    "jobs/mnist_mpi --workers 5",
    "jobs/mnist_multi_worker_mirrored --workers 3",
    "jobs/mnist_parameter_server --workers 4",
    "jobs/digits_parameter_server --workers 3",
    "jobs/mnist_torch_ddp --on kubernetes --dry-run client --workers 4",
    "jobs/mnist_parameter_server --on kubernetes --workers 4 --timeout 1h",
    "jobs/mnist_mpi --on kubernetes --workers 3 -a epochs=1",
    "jobs/mnist_torch_ddp --on kubernetes --config KINDS",
    "jobs/digits_resumable --on kubernetes --config ELASTIC",
    "jobs/mnist_torch_ddp --on sagemaker --config DRIVERS --workers 4",
    "jobs/mnist_horovod --on sagemaker --config DRIVERS --workers 4",
    "jobs/mnist_torch_ddp --on sagemaker --config SPOT",
    "jobs/mnist_torch_ddp --on spark --config SPARK --workers 4",
    "jobs/mnist_torch_ddp --on spark --config STANDALONE",
    "jobs/spark_sgd --on spark --config STANDALONE",
    "jobs/bert_pretraining/trainium.yaml --on kubernetes --config jobs/clusters/eks/place.yaml",
    f"jobs/bert_pretraining/trainium.yaml --on torchx {' '.join(TRAINIUM)}",
    "jobs/bert_pretraining/precompile.yaml --on torchx "
    "--config jobs/bert_pretraining/trainium/place-precompile.yaml",
)
ROLE = "role: arn:aws:iam::123456789012:role/workshop\nregion: us-east-1\n"
PLACES = {
    "KINDS": "kind: TrainJob\nnamespace: team-a\nkeep: 2h\nnode_selector: {disk: ssd}\nimage: example.com/torch:1\n",
    "ELASTIC": "elastic: {min_workers: 1, max_workers: 3}\n",
    "DRIVERS": f"{ROLE}mode: drivers\nprocesses_per_host: 2\ninstance_type: ml.c5.2xlarge\ntags: {{team: a}}\n",
    "SPOT": f"{ROLE}spot: true\nmax_wait: 1h\nbucket: my-own-bucket\ninput_mode: FastFile\nvolume_gb: 50\nretries: 3\n",
    "SPARK": (ROOT / "jobs/clusters/spark/kubernetes.yaml").read_text(),
    # As that file has it, except that the secret exists.
    "STANDALONE": re.sub(
        r"secret_file: \S+", "secret_file: SECRET", (ROOT / "jobs/clusters/spark/standalone.yaml").read_text()
    ),
}  # fmt: skip


def kept(answers: dict[str, dict[str, Any]]) -> str:
    """The answers as a file: what was rendered by name, then what was refused, by sentence."""
    rendered = {name: answer["rendered"] for name, answer in sorted(answers.items()) if "rendered" in answer}
    refused: dict[str, list[str]] = {}
    for name, answer in sorted(answers.items()):
        if "refused" in answer:
            refused.setdefault(answer["refused"], []).append(name)
    return yaml.dump(
        {"rendered": rendered, "refused": refused}, Dumper=WithoutAnchors, width=110, allow_unicode=True
    )


def read(file: Path) -> dict[str, dict[str, Any]]:
    """The answers in a file that `kept` has written."""
    content = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    answers = {name: {"rendered": what} for name, what in content.get("rendered", {}).items()}
    for sentence, names in content.get("refused", {}).items():
        answers |= {name: {"refused": sentence} for name in names}
    return answers


class WithoutAnchors(yaml.SafeDumper):
    """Writes what occurs twice twice, since it is to be read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def difference(before: Any, after: Any) -> str:
    """A short unified difference between two answers."""
    texts = [
        yaml.dump(answer, Dumper=WithoutAnchors, width=110).splitlines() if answer else []
        for answer in (before, after)
    ]
    lines = list(difflib.unified_diff(*texts, "kept", "now", lineterm="", n=2))
    more = [f"... and {len(lines) - MOST_LINES} lines more"] if len(lines) > MOST_LINES else []
    return "\n".join([*lines[:MOST_LINES], *more])


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`answer(arguments)` is what `workshop launch ARGUMENTS --render` says, as data."""
    monkeypatch.chdir(ROOT)
    for name in ("PYTHONPATH", "PYTHONUNBUFFERED", "AWS_REGION", "AWS_DEFAULT_REGION", "WORKSHOP_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "secret").write_text("s")
    for name, text in PLACES.items():
        (tmp_path / f"{name}.yaml").write_text(text.replace("SECRET", str(tmp_path / "secret")))

    def say(arguments: tuple[str, ...]) -> dict[str, Any]:
        words = [str(tmp_path / f"{word}.yaml") if word in PLACES else word for word in arguments]
        said = workshop("launch", *words, *([] if "--dry-run" in words else ["--render"]))
        assert not said.traceback, f"workshop launch {' '.join(words)}:\n{said.traceback}"
        out, err = (text.replace(str(tmp_path), "TEST") for text in (said.out, said.err))
        if said.code == 0:
            return {"rendered": rendering(out)}
        assert (said.code, out) == (2, ""), f"workshop launch {' '.join(words)} ends with {said.code}: {err}"
        assert len(err.splitlines()) == 1, f"a refusal is one sentence, not:\n{err}"
        return {"refused": without_accidents(err).removeprefix("workshop: ").strip()}

    return say


@pytest.mark.parametrize(
    "target",
    [
        "local",
        "spark",
        "torchx",
        "sagemaker",
        "sagemaker-stand-in",
        "kubernetes",
        "kubernetes-stand-in",
        "options",
    ],
)
def test_what_is_rendered_stays_the_same(target: str, answer: Any) -> None:
    file = HERE / f"{target}.yaml"
    now = {name: answer(arguments) for name, arguments in launches(target)}
    if target.endswith(
        "-stand-in"
    ):  # it shows what the place itself would be sent; only differences are kept
        place = read(HERE / f"{target.removesuffix('-stand-in')}.yaml")
        now = {name: said for name, said in now.items() if said != place.get(name)}
    # Through the file's form, so that both sides have the same types.
    text = kept(now)
    if os.environ.get("GUARDS_UPDATE"):
        file.write_text(text, encoding="utf-8")
        pytest.fail(f"written: look at the difference with git diff {file.relative_to(ROOT)}")
    before, after = read(file), {name: yaml.safe_load(yaml.safe_dump(said)) for name, said in now.items()}
    changed = [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]
    assert not changed, (
        f"{len(changed)} of {len(after)} differ on {target}: {', '.join(changed)}\n"
        f"the first of them, {changed[0]}:\n{difference(before.get(changed[0]), after.get(changed[0]))}"
    )


def test_every_job_is_kept_for_every_target() -> None:
    for target in ("local", "spark", "sagemaker", "kubernetes"):
        assert sorted(read(HERE / f"{target}.yaml")) == JOBS
    assert set(read(HERE / "torchx.yaml")) >= ON_TORCHX
