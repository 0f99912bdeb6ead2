"""A right training is equal to one process; of a wrong one, the report names parameter, ranks, kind and line."""

import functools
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from workshop_utils import on_ranks
from workshop_utils.comm import threads
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.parallel import gpt, mesh, tensor
from workshop_utils.parallel.verify import verify

pytestmark = pytest.mark.processes

SIZES = gpt.GPTSizes(layers=2, width=8, heads=4, sequence=8)


class OverTensorRanks:
    """Data × tensor, by the workshop's own parts."""

    def __init__(self, model, groups):
        self.groups, self.region = groups, tensor.Region(groups.tensor)
        self.module = tensor.parallelize(model, self.region)
        self.optimizer = torch.optim.Adam(self.module.parameters(), 0.01)

    def step(self, batch):
        self.optimizer.zero_grad()
        data = self.groups.data
        tokens, targets = (each.chunk(data.size)[data.rank] for each in batch)
        loss = tensor.vocabulary_parallel_cross_entropy(
            self.module(tokens), targets, self.region, SIZES.vocabulary
        )
        loss.backward()
        self.finish()
        mean = loss.detach().numpy().reshape(1).copy()
        ring_all_reduce(data, mean, "mean")
        return mean[0]

    def finish(self):
        mesh.synchronise(self.module, self.groups)

    def update(self):
        norm = mesh.clip_gradients(self.module, self.groups, 0.5)
        self.optimizer.step()
        return norm

    def state_dict(self):
        return {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class NoMean(OverTensorRanks):
    def finish(self):
        pass


class SummedTwice(OverTensorRanks):
    def finish(self):
        super().finish()
        tensor.all_reduce_gradients(self.module.parameters(), self.groups.data, "sum")


class SharesOfTensorRanks(OverTensorRanks):
    def finish(self):
        super().finish()
        for each in self.module.parameters():
            each.grad /= self.groups.tensor.size


class OwnNorm(OverTensorRanks):
    def update(self):
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), 0.5)
        self.optimizer.step()
        return norm.item()


class WithoutMoments(OverTensorRanks):
    def load_state_dict(self, state):
        self.module.load_state_dict(state["model"])


class BiasOnEveryRank(OverTensorRanks):
    def __init__(self, model, groups):
        super().__init__(model, groups)
        for each in self.module.modules():
            if isinstance(each, tensor.RowParallelLinear):
                each.forward = functools.partial(biased, each)


def biased(layer, x):
    return layer.region.sum_up(functional.linear(x, layer.weight, layer.bias))


class OwnWeights(OverTensorRanks):
    def __init__(self, model, groups):
        super().__init__(model, groups)
        nn.init.normal_(self.module.layers[-1].vocabulary.weight)


class SameParts(OverTensorRanks):
    def initialise(self):
        for each in self.module.parameters():
            if each.dim() == 2:
                nn.init.normal_(each)


class OldWeights(OverTensorRanks):
    def __init__(self, model, groups):
        super().__init__(model, groups)
        self.optimizer = torch.optim.Adam([each.detach().clone() for each in self.module.parameters()], 0.01)

    def step(self, batch):
        self.module.zero_grad()
        return super().step(batch)


class ClearedByUpdate(OverTensorRanks):
    def step(self, batch):
        self.optimizer.zero_grad, clear = lambda: None, self.optimizer.zero_grad
        try:
            return super().step(batch)
        finally:
            self.optimizer.zero_grad = clear

    def update(self):
        norm = super().update()
        self.optimizer.zero_grad()
        return norm


class StepAlone:
    def __init__(self, model, groups):
        self.training = OverTensorRanks(model, groups)
        self.module, self.step = self.training.module, self.training.step


class BiasesNotCleared(OverTensorRanks):
    def step(self, batch):
        names = [name for name, _ in self.module.named_parameters() if name.endswith("bias")]
        kept = [self.module.get_parameter(name).grad for name in names]
        loss = super().step(batch)
        for name, each in zip(names, kept, strict=True):
            if each is not None:
                self.module.get_parameter(name).grad += each
        return loss


OURS = {
    OverTensorRanks: [],
    ClearedByUpdate: [],
    StepAlone: [],
    NoMean: [("data 2", "gradient", "no mean was taken", r"in step, tensor.py:\d+ in backward")],
    SummedTwice: [
        (
            "data 2",
            "gradient",
            "2 times too large",
            r"in step, test_verify.py:\d+ in finish, tensor.py:\d+ in all_reduce",
        )
    ],
    SharesOfTensorRanks: [("tensor 2", "gradient", "2 times too small", r"test_verify.py:\d+ in finish")],
    OwnNorm: [("tensor 2", "norm", "what this rank holds alone", "in OwnNorm.update")],
    WithoutMoments: [("one rank", "restart", "'optimizer'", "in WithoutMoments.load_state_dict")],
    BiasOnEveryRank: [
        ("tensor 2", "loss", "layers.1.attention.out is the first", "RowParallelLinear.forward")
    ],
    OwnWeights: [("one rank", "weights", "does not keep the weights", "OwnWeights")],
    OldWeights: [("one rank", "updated weights", "no update moves them", "in OverTensorRanks.update")],
    BiasesNotCleared: [
        ("one rank", "gradient", "of the step before are still in it", "in BiasesNotCleared.step")
    ],
    SameParts: [
        ("one rank", "first weights", "not those that one process draws", "in SameParts.initialise"),
    ],
}


def build_gpt():
    return gpt.GPT(SIZES, seed=1)


def gpt_loss(model, batch):
    return gpt.cross_entropy(model(batch[0]), batch[1])


def compare_ours(communicator, kinds):
    torch.set_num_threads(1)
    batch = gpt.batch_of(gpt.manual(), 1, 4, SIZES.sequence)
    layout = {"data": 2, "tensor": 2}
    return [verify(build_gpt, gpt_loss, kind, batch, layout, communicator) for kind in kinds]


@pytest.fixture(scope="module")
def ours():
    by_rank = on_ranks(4, compare_ours, {"kinds": [*OURS]}, timeout="300s").values
    assert by_rank == [by_rank[0]] * 4  # every rank has the same report
    return dict(zip(OURS, by_rank[0], strict=True))


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_the_report_says_at_which_cut_what_is_wrong_and_where(ours, kind):
    report, expected = ours[kind], OURS[kind]
    assert [(each.cut, each.check) for each in report.findings] == [row[:2] for row in expected]
    for each, (_, _, words, line) in zip(report.findings, expected, strict=True):
        assert words in each.kind
        assert re.search(line, each.line), each.line


def test_a_right_training_was_tried_at_every_cut(ours):
    assert ours[OverTensorRanks].tried == ("one rank", "data 2", "tensor 2", "data 2 × tensor 2")
    assert "data 2 × tensor 2, since data 2 is wrong" in ours[NoMean].left_out


def test_a_finding_names_parameters_and_ranks(ours):
    (finding,) = ours[SharesOfTensorRanks].findings
    assert finding.parameters[0] == "layers.3.vocabulary.weight"
    assert len(finding.parameters) == len([*build_gpt().parameters()])
    assert finding.ranks == (0, 1)
    assert finding.error == pytest.approx(0.5)
    assert finding.tolerance < 1e-10
    text = str(ours[SharesOfTensorRanks])
    assert "gradient of layers.3.vocabulary.weight, layers.3.norm.bias" in text


def unseeded():
    generator = np.random.default_rng()
    model = build_gpt()
    model.layers[1].mlp.up.bias.data += torch.from_numpy(generator.normal(size=4 * SIZES.width))
    return model


def noisy(model, batch):
    return gpt_loss(model, batch) + 1e-3 * torch.rand(())


def summed(model, batch):
    return gpt_loss(model, batch) * batch[1].numel()


def dead(model, batch):
    return 0 * gpt_loss(model, batch)


@pytest.mark.parametrize(
    ("build", "loss", "layout", "message"),
    [
        (
            unseeded,
            gpt_loss,
            {},
            "build gives other numbers for layers.1.mlp.up.bias each time, with one seed",
        ),
        (build_gpt, noisy, {}, "for the same batch; dropout layers are off already"),
        (build_gpt, summed, {}, "with every example twice; it must be a mean"),
        (build_gpt, dead, {}, "batch gives no parameter a gradient"),
        (build_gpt, gpt_loss, {"data": 2}, "layout is data 2, 2 ranks; there are 1: start 2, or a multiple"),
        (build_gpt, gpt_loss, {"data": 0}, "layout has data 0; a direction's size is a whole number"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_sentence(build, loss, layout, message):
    def program(communicator):
        batch = gpt.batch_of(gpt.manual(), 1, 4, SIZES.sequence)
        with pytest.raises(ValueError, match=re.escape(message)):
            verify(build, loss, OverTensorRanks, batch, layout, communicator)

    threads.run(1, program)
