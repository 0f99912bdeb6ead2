"""The BERT job: any number of ranks takes the same steps, a restarted run too, and what cannot be is said at once."""

import runpy

import numpy as np
import pytest
import torch
from launching import JOBS, launched

from workshop_utils.launchers.local import warm
from workshop_utils.runs import RunFailed

JOB = JOBS / "bert_pretraining"
TINY = {"layers": 1, "hidden": 32, "sequence": 24, "warmup_steps": 2, "dropout": 0.0, "steps": 4}
CLS, SEP, MASK, NOT_ASKED = 2, 3, 4, -100

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("bert_is_imported")]


@pytest.fixture(scope="module")
def bert_is_imported():
    """The server that ranks are forked from has imported BERT, too, which takes seconds."""
    modules = (*warm.WARM_MODULES["torch"], "tokenizers", "transformers.models.bert.modeling_bert")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(warm.WARM_MODULES, "torch", modules)
        patch.delitem(warm.SERVERS, "torch", raising=False)
        yield
        warm.SERVERS.pop("torch").close()


def prepared(folder, **arguments):
    """The run that has written a corpus into `folder`."""
    return launched("bert_pretraining", workers=1, arguments={"prepare": str(folder), **arguments})


Trained = tuple[np.ndarray, dict[str, torch.Tensor]]


def trained(folder, workers=1, **arguments):
    """The losses, shape (ranks, steps), and the weights, if the training came to its end."""
    arguments = {name: str(value) for name, value in {**TINY, **arguments}.items()}
    variables = {"WORKSHOP_CHECKPOINTS": str(folder / "checkpoints")}
    changes = {"workers": workers, "arguments": arguments, "environment": variables}
    metrics = launched("bert_pretraining", folder, **changes).metrics
    losses = metrics.pivot(index="rank", columns="step", values="loss").to_numpy()
    file = folder / "model.pt"
    return losses, torch.load(file) if file.is_file() else {}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    prepared(folder, vocabulary=300)
    return folder


@pytest.fixture(scope="module")
def in_one_process(corpus, tmp_path_factory):
    return trained(tmp_path_factory.mktemp("one"), corpus=corpus, batch_size=6)


@pytest.mark.parametrize(("workers", "batch_size", "accumulation"), [(2, 1, 3), (1, 2, 3)])
def test_a_batch_takes_the_same_steps_however_it_is_shared_out(
    workers, batch_size, accumulation, in_one_process, corpus, tmp_path
):
    expected, ours = in_one_process
    shares = {"batch_size": batch_size, "grad_accumulation": accumulation}
    losses, theirs = trained(tmp_path, workers, corpus=corpus, **shares)
    assert losses.mean(axis=0) == pytest.approx(expected[0], abs=1e-5)
    assert set(theirs) == set(ours)
    for name, weights in ours.items():
        torch.testing.assert_close(theirs[name], weights, atol=2e-5, rtol=0)


def test_a_restarted_run_ends_with_the_same_weights_bit_by_bit(corpus, tmp_path):
    chosen = {"corpus": corpus, "batch_size": 2, "dropout": 0.1, "steps": 6}
    _, ours = trained(tmp_path / "whole", 2, **chosen)
    saving = {"checkpoint_steps": 2, **chosen}
    first, none = trained(tmp_path / "parts", 2, steps_this_run=3, **saving)
    assert (first.shape, none) == ((2, 3), {})  # the training is not over, so there is no model yet
    second, theirs = trained(tmp_path / "parts", 2, **saving)
    assert second.shape == (2, 3)
    assert all(torch.equal(theirs[name], weights) for name, weights in ours.items())
    with pytest.raises(RunFailed, match="are of another run"):
        trained(tmp_path / "parts", 2, **saving, hidden=16)


def test_what_is_hidden_is_as_in_the_paper():
    masked = runpy.run_path(str(JOB / "train.py"))["masked"]
    rows = np.random.default_rng(1).integers(5, 2048, (1000, 62))
    pairs = [masked(row, 2048, np.random.default_rng((0, index))) for index, row in enumerate(rows)]
    tokens, labels = (np.stack(column) for column in zip(*pairs, strict=True))
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
