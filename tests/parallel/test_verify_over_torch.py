"""PyTorch's DDP, FSDP2 and DTensor under `verify`: right trainings, and each kind of mistake that a report names."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as styles
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from workshop_utils import on_ranks
from workshop_utils.parallel.verify import device_mesh, verify

pytestmark = pytest.mark.processes


class OverDDP:
    """By PyTorch: two microbatches, dropout, and a mean over targets of which ranks have unequally many."""

    rate, updates = 0.01, 0

    def __init__(self, model, groups):
        self.data, self.tensor, self.steps = groups["data"], groups["tensor"], 0
        self.module = self.cut(model)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), self.rate)

    def cut(self, model):
        return DistributedDataParallel(model, process_group=self.data.get_group())

    def synchronise(self, is_last):
        self.module.require_backward_grad_sync = is_last  # as no_sync does

    def seed(self):
        return self.steps * self.data.size() + self.data.get_local_rank()

    def share(self, batch):
        return [each.tensor_split(self.data.size())[self.data.get_local_rank()] for each in batch]

    def padded(self, x):
        return torch.cat([x, x[: -len(x) % self.data.size()]])

    def counted(self, batch):
        return (batch[1] != -100).sum() / self.data.size()

    def total(self, number):
        dist.all_reduce(number, group=self.data.get_group())
        return number

    def step(self, batch):
        self.optimizer.zero_grad()
        torch.manual_seed(self.seed())
        parts, losses = [*zip(*(each.chunk(2) for each in self.share(batch)), strict=True)], []
        for part in parts:
            self.synchronise(part is parts[-1])
            losses.append(summed_loss(self.module, part) / self.counted(batch))
            losses[-1].backward()
        self.steps += 1
        return self.mean(sum(losses).detach())

    def mean(self, loss):
        return (self.total(loss) / self.data.size()).item()

    def clip(self):
        return nn.utils.clip_grad_norm_(self.module.parameters(), 0.1)

    def update(self):
        norm = self.clip()
        self.optimizer.step()
        return getattr(norm, "full_tensor", lambda: norm)().item()

    @torch.no_grad()
    def evaluate(self, batches):
        self.module.eval()
        shares = [self.share(batch) for batch in batches]
        sums = [torch.stack([summed_loss(self.module, each), (each[1] != -100).sum()]) for each in shares]
        self.module.train()
        loss, count = self.total(sum(sums))
        return (loss / count).item()

    def state_dict(self):
        model, optimizer = get_state_dict(self.module, self.optimizer)
        return {"model": model, "optimizer": optimizer, "steps": self.steps}

    def load_state_dict(self, state):
        names = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.module, self.optimizer, **names)
        self.steps = state["steps"]


class OverFSDP(OverDDP):
    policy = MixedPrecisionPolicy()

    def cut(self, model):
        fully_shard(model[4], mesh=self.data, mp_policy=self.policy)
        return fully_shard(model, mesh=self.data, mp_policy=self.policy, reshard_after_forward=True)

    def synchronise(self, is_last):
        self.module.set_requires_gradient_sync(is_last)


class OverDTensor(OverDDP):
    def cut(self, model):
        plan = {
            "0": styles.RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            "2": styles.PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
            ),
            "3": styles.SequenceParallel(),
            "4": styles.ColwiseParallel(input_layouts=Shard(1)),
            "6": styles.RowwiseParallel(output_layouts=Shard(1)),
            "7": styles.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        return styles.parallelize_module(model, self.tensor, plan)

    def synchronise(self, is_last):
        pass


class OverBoth(OverFSDP):
    def cut(self, model):
        return super().cut(OverDTensor.cut(self, model))


class OtherShare(OverBoth):
    def step(self, batch):
        size = self.data.size()
        off = (self.data.get_local_rank() - dist.get_rank()) % size
        return super().step([each.roll(off * len(each) // size, 0) for each in batch])


class NoSumBack(OverDTensor):
    def cut(self, model):
        up = super().cut(model)[4]

        def forward(x):
            own = functional.linear(x.to_local(), up.weight.to_local(), up.bias.to_local())
            return DTensor.from_local(own, self.tensor, [Shard(-1)])

        up.forward = forward
        return model


class OwnShards(OverFSDP):
    def clip(self):
        shards = [each.grad.to_local() for each in self.module.parameters()]
        norm = torch.stack([each.norm() for each in shards]).norm()
        for each in shards:
            each.mul_(torch.clamp(0.1 / norm, max=1.0))
        return norm


class OwnShardsUnseen(OverDTensor):
    def update(self):
        OwnShards.clip(self)
        self.optimizer.step()


class RowsLost(OverDTensor):
    def cut(self, model):
        rows = model[4].bias.detach().split(16 if self.tensor.size() == 1 else 7)
        model[4].bias = nn.Parameter(rows[self.tensor.get_local_rank()])
        return model


class Schedule(OverDDP):
    def update(self):
        self.updates += 1
        self.optimizer.param_groups[0]["lr"] = self.rate_now()
        return super().update()

    def rate_now(self):
        return self.rate / self.updates


def changed(base, *expected, **attributes):
    return type("Changed", (base,), attributes), *expected


# Of each training the class, and of what is found: cut, check, first parameter; words of the kind; line.
DATA = {
    "DDP": (OverDDP,),
    "means of ranks": changed(
        OverDDP,
        "data 2: loss; means of 2 parts of the batch; in step",
        "data 2: gradient of 7.bias; means of 2 parts of the batch; in step",
        counted=lambda self, batch: (self.share(batch)[1] != -100).sum(),
    ),
    "never in sync": changed(
        OverDDP,
        "data 2: gradient of 7.bias; each rank has a part of a sum, and the parts were not added up; in step",
        counted=lambda _, batch: (batch[1] != -100).sum(),
        synchronise=lambda self, is_last: OverDDP.synchronise(self, False),
        mean=lambda self, loss: self.total(loss).item(),
    ),
    "own loss": changed(
        OverDDP, "data 2: loss; of each rank's share; DDP.step", mean=lambda _, loss: loss.item()
    ),
    "padded": changed(
        OverDDP,
        "data 2: evaluation; to make a multiple of 2, count twice; in OverDDP.evaluate",
        share=lambda self, batch: OverDDP.share(self, [*map(self.padded, batch)]),
    ),
    "odd example left out": changed(
        OverDDP,
        "one rank: evaluation; other examples count, or count differently; in OverDDP.evaluate",
        share=lambda self, batch: OverDDP.share(self, [each[: len(each) // 2 * 2] for each in batch]),
    ),
    "mean of batches": changed(
        OverDDP,
        "one rank: evaluation; batches count alike; in <lambda>",
        evaluate=lambda self, batches: sum(OverDDP.evaluate(self, [each]) for each in batches) / len(batches),
    ),
    "one seed": changed(
        OverDDP, "data 2: dropout; get the same dropout mask; in OverDDP.step", seed=lambda self: self.steps
    ),
    "first seed again": changed(
        OverDDP,
        "one rank: dropout; first step's random numbers again; in OverDDP.step",
        load_state_dict=lambda self, state: OverDDP.load_state_dict(self, state | {"steps": 0}),
    ),
    "moments forgotten": changed(
        OverDDP,
        "one rank: restart of 7.bias; state['optimizer']['state']; in <lambda>",
        load_state_dict=lambda self, state: OverDDP.load_state_dict(
            self, state | {"optimizer": self.state_dict()["optimizer"]}
        ),
    ),
    "schedule forgotten": (Schedule, "one rank: restart of 7.bias; that matters is not saved; load_state"),
    "rate times ranks": changed(
        Schedule,
        "data 2: updated weights of 7.bias; not what the updates of one rank make; in Schedule.update",
        rate_now=lambda self: self.rate * self.data.size(),
    ),
    "squares of all": changed(
        OverDDP,
        "data 2: norm; held more than once counts each time; in OverDDP.update",
        clip=lambda self: self.total(OverDDP.clip(self) ** 2) ** 0.5,
    ),
    "FSDP": (OverFSDP,),
    "own shards": (OwnShards, "data 2: norm; what this rank holds alone; in OverDDP.update"),
    "mean of norms": changed(
        OwnShards,
        "data 2: norm; times as long as it should be; in OverDDP.update",
        clip=lambda self: self.total(OwnShards.clip(self)) / self.data.size(),
    ),
    "summed in float32": changed(
        OverFSDP,
        "one rank: precision of 7.bias; as far off as float32 rounds; in step",
        policy=MixedPrecisionPolicy(reduce_dtype=torch.float32),
    ),
}
TENSOR = {
    "DTensor": (OverDTensor,),
    "own seeds": changed(
        OverDTensor,
        "tensor 2: dropout; ranks with the same activations get different dropout masks; in OverDDP.step",
        seed=lambda self: 1000 * self.tensor.get_local_rank() + self.steps,
    ),
    "no sum back": (
        NoSumBack,
        "tensor 2: gradient of 3.bias; gradients are right back to 4.weight, and wrong from 3.bias on; in step",
    ),
    "own shards, unseen": (
        OwnShardsUnseen,
        "tensor 2: updated weights of 7.bias; not what the updates of one rank make; in OwnShardsUnseen.update",
        "tensor 2: updated weights of 6.bias; have come apart; in OwnShardsUnseen.update",
    ),
    "rows lost": (RowsLost, "tensor 2: weights of 4.bias; no rank has all of their numbers; RowsLost"),
    "same draws": changed(
        OverDTensor,
        "tensor 2: first weights of 7.bias; not those that one process draws; in <lambda>",
        initialise=lambda self: draw(self.module),
    ),
}
BOTH = {
    "both": (OverBoth,),
    "other share": (
        OtherShare,
        "data 2 × tensor 2: loss; 0 is the first layer whose output differs; in Embedding.forward",
    ),
}
LAYOUTS = (
    (DATA, {"data": 2, "tensor": 1}),
    (TENSOR, {"data": 1, "tensor": 2}),
    (BOTH, {"data": 2, "tensor": 2}),
)
TRAININGS = DATA | TENSOR | BOTH


def draw(model):
    for each in model.parameters():
        own = each.detach().to_local() if isinstance(each, DTensor) else each.detach()
        own.copy_(torch.randn(own.shape, dtype=torch.float32))


def build_small():
    layers = nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 12)
    model = nn.Sequential(nn.Embedding(12, 8), nn.Dropout(0.1), nn.Identity(), *layers)
    torch.manual_seed(0)
    draw(model)
    return model


def summed_loss(model, batch):
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")


def small_loss(model, batch):
    return summed_loss(model, batch) / (batch[1] != -100).sum()


def compare(_):
    torch.set_num_threads(1)
    tokens = torch.randint(12, (8, 8), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([8, 3, 5, 2, 8, 8, 1, 6])
    batch = tokens, tokens.masked_fill(torch.arange(8) >= lengths[:, None], -100)
    return [
        verify(build_small, small_loss, kind, batch, layout, mesh=device_mesh)
        for trainings, layout in LAYOUTS
        for kind, *_ in trainings.values()
    ]


@pytest.fixture(scope="module")
def reports():
    by_rank = on_ranks(4, compare, framework="torch", timeout="300s").values
    assert by_rank == [by_rank[0]] * 4  # every rank has the same report
    return dict(zip(TRAININGS, by_rank[0], strict=True))


@pytest.mark.parametrize("name", TRAININGS)
def test_the_report_says_at_which_cut_what_is_wrong_and_where(reports, name):
    rows, shown = [row.split("; ") for row in TRAININGS[name][1:]], {}
    for each in reports[name].findings:
        shown[" of ".join((f"{each.cut}: {each.check}", *each.parameters[:1]))] = each
    assert {what.split(":")[0] for what in shown} == {what.split(":")[0] for what, _, _ in rows}, shown
    for what, words, line in rows:
        assert words in shown[what].kind
        assert line in shown[what].line


def test_a_right_training_was_tried_at_every_cut(reports):
    assert reports["both"].tried == ("one rank", "data 2", "tensor 2", "data 2 × tensor 2")
    assert "this batch gives them no gradient" in reports["both"].left_out[-1]
