"""The BERT job: any number of ranks takes the same steps, a restarted run too, and what cannot be is said at once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from workshop_utils.jobs import TrainingJob

HOST = Path(__file__).with_name("bert_ranks.py")
JOB = Path(__file__).parents[2] / "jobs" / "bert_pretraining"
TINY = {"layers": 1, "hidden": 32, "sequence": 24, "warmup-steps": 2, "dropout": 0.0}
CLS, SEP, MASK, NOT_ASKED = 2, 3, 4, -100

pytestmark = pytest.mark.slow


class Host:
    """Ranks of the job, forked from one process that has imported it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process that ranks are forked from has ended"
        return json.loads(line)

    def run(self, folder: Path, size: int = 1, **arguments: Any) -> tuple[list[int], list[str]]:
        """Exit codes and outputs of the ranks."""
        words = [
            word for key, value in arguments.items() for word in (f"--{key.replace('_', '-')}", str(value))
        ]
        variables = {"WORKSHOP_MODEL": str(folder), "WORKSHOP_CHECKPOINTS": str(folder / "checkpoints")}
        answer = self.ask(size=size, words=words, variables=variables)
        return answer["codes"], answer["outputs"]

    def trained(
        self, folder: Path, size: int = 1, **arguments: Any
    ) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
        """The losses, shape (ranks, steps), and the weights, if the training came to its end."""
        codes, outputs = self.run(folder, size, **(TINY | {"steps": 4} | arguments))
        assert codes == [0] * size, outputs
        lines = [[json.loads(line) for line in text.splitlines() if '"metric"' in line] for text in outputs]
        losses = np.array([[record["loss"] for record in records] for records in lines])
        file = folder / "model.pt"
        return losses, torch.load(file) if file.is_file() else {}


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    process = subprocess.Popen(
        ["env", "OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1", "HF_HUB_OFFLINE=1", sys.executable, str(HOST)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Host(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)


@pytest.fixture(scope="module")
def corpus(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    codes, outputs = host.run(folder, prepare=folder, vocabulary=500)
    assert codes == [0], outputs
    return folder


def test_the_corpus_is_python_s_own_manual_and_is_the_same_each_time(
    host: Host, corpus: Path, tmp_path: Path
) -> None:
    tokens = np.load(corpus / "tokens.npy")
    assert len(tokens) > 100_000
    assert tokens.min() >= 5  # nothing unknown, and nothing that is said to the model only
    assert tokens.max() < 500
    host.run(tmp_path, prepare=tmp_path, vocabulary=500)
    assert (tmp_path / "tokens.npy").read_bytes() == (corpus / "tokens.npy").read_bytes()


def test_a_folder_of_texts_becomes_a_corpus(host: Host, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_text("Trainium trains. " * 50, encoding="utf-8")
    (tmp_path / "b" / "c.txt").write_text("Neurons fire. " * 50, encoding="utf-8")
    codes, outputs = host.run(tmp_path, prepare=tmp_path / "corpus", text=tmp_path, vocabulary=300)
    assert (codes, outputs[0].startswith("2 texts, ")) == ([0], True)
    losses, _ = host.trained(tmp_path, corpus=tmp_path / "corpus", steps=2)
    assert losses.shape == (1, 2)


def test_two_processes_equal_one_with_twice_the_batch(host: Host, corpus: Path, tmp_path: Path) -> None:
    two, theirs = host.trained(tmp_path / "two", 2, corpus=corpus, batch_size=3)
    one, ours = host.trained(tmp_path / "one", 1, corpus=corpus, batch_size=6)
    assert two.mean(axis=0) == pytest.approx(one[0], abs=1e-5)
    assert set(theirs) == set(ours)
    for name, weights in ours.items():
        torch.testing.assert_close(theirs[name], weights, atol=2e-5, rtol=0)
    _, others = host.trained(tmp_path / "other", 1, corpus=corpus, batch_size=6, seed=1)
    assert (
        max(float((others[name] - ours[name]).abs().max()) for name in ours) > 1e-2
    )  # the comparison can fail


def test_gradients_of_two_forward_passes_equal_those_of_one_with_both(
    host: Host, corpus: Path, tmp_path: Path
) -> None:
    parts, theirs = host.trained(tmp_path / "parts", 2, corpus=corpus, batch_size=2, grad_accumulation=2)
    whole, ours = host.trained(tmp_path / "whole", 2, corpus=corpus, batch_size=4)
    assert parts == pytest.approx(whole, abs=1e-5)
    for name, weights in ours.items():
        torch.testing.assert_close(theirs[name], weights, atol=2e-5, rtol=0)


def test_a_restarted_run_ends_with_the_same_weights_bit_by_bit(
    host: Host, corpus: Path, tmp_path: Path
) -> None:
    chosen = {"corpus": corpus, "batch_size": 2, "dropout": 0.1, "steps": 6}
    _, ours = host.trained(tmp_path / "whole", 2, **chosen)
    saving = {"checkpoint_steps": 2, **chosen}
    first, none = host.trained(tmp_path / "parts", 2, steps_this_run=3, **saving)
    assert (first.shape, none) == ((2, 3), {})  # the training is not over, so there is no model yet
    second, theirs = host.trained(tmp_path / "parts", 2, **saving)
    assert second.shape == (2, 3)
    assert all(torch.equal(theirs[name], weights) for name, weights in ours.items())
    codes, outputs = host.run(tmp_path / "parts", 2, **(TINY | saving | {"hidden": 16}))
    assert set(codes) != {0}
    assert "are of another run" in outputs[0]


def test_what_is_hidden_is_as_in_the_paper(host: Host) -> None:
    answer = host.ask(masks=1000)
    rows, tokens, labels = (np.array(answer[name]) for name in ("rows", "tokens", "labels"))
    assert set(tokens[:, 0]) == {CLS}
    assert set(tokens[:, -1]) == {SEP}
    chosen = labels[:, 1:-1] != NOT_ASKED
    assert set(chosen.sum(axis=1)) == {round(0.15 * 62)}  # the same in each: so that means of means are means
    assert (labels[:, [0, -1]] == NOT_ASKED).all()
    assert (labels[:, 1:-1][chosen] == rows[chosen]).all()
    assert (tokens[:, 1:-1][~chosen] == rows[~chosen]).all()
    seen = tokens[:, 1:-1][chosen]
    assert (seen == MASK).mean() == pytest.approx(0.8, abs=0.02)
    assert (seen == rows[chosen]).mean() == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"device": "cuda"}, "one worker needs one. Use fewer workers, or --device cpu"),
        (
            {"device": "neuron"},
            "torch_neuronx is not installed: it is in the image of jobs/images/neuron.Dockerfile",
        ),
        ({"hidden": 30, "heads": 4}, "hidden is 30; heads, 4, must divide it"),
        ({"sequence": 4}, "sequence is 4; it must be at least 8"),
        ({"corpus": "/nowhere"}, "corpus is /nowhere; there is no tokens.npy in it: write it with --prepare"),
        ({"prepare": "/nowhere/a", "text": "/nowhere/b"}, "text is /nowhere/b; there is no .txt file in it"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_is_said_in_a_sentence(
    host: Host, tmp_path: Path, arguments: dict[str, Any], said: str
) -> None:
    variables = {"LOCAL_RANK": "99", "WORKSHOP_MODEL": str(tmp_path)}  # no machine has a hundred GPUs
    words = [word for key, value in arguments.items() for word in (f"--{key}", str(value))]
    answer = host.ask(size=1, words=words, variables=variables)
    assert answer["codes"] != [0]
    assert said in answer["outputs"][0]
    assert "Traceback" not in answer["outputs"][0]


@pytest.mark.parametrize("name", ["trainium.yaml", "precompile.yaml"])
def test_the_script_takes_the_arguments_of_the_jobs_for_trainium(host: Host, name: str) -> None:
    words = TrainingJob.load(JOB / name).command_line_arguments
    answer = host.ask(size=1, words=words, variables={})
    assert "torch_neuronx is not installed" in answer["outputs"][0]  # and nothing before it
