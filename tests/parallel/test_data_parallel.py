"""Our data parallelism, naive, bucketed and overlapped, equals training in one process, and sends what it must."""

import threading

import pytest
import torch
from parallel_training import MODULES, OPTIMIZERS, batches, by_one_process, flat, made, share, train
from torch import distributed, nn

from workshop_utils import on_ranks
from workshop_utils.comm import threads
from workshop_utils.comm.communicator import PeerDied
from workshop_utils.comm.ring import ring_bytes_sent
from workshop_utils.parallel.data import (
    BucketedDataParallel,
    NaiveDataParallel,
    OverlappedDataParallel,
    UnusedParameters,
    buckets_of,
)

pytestmark = pytest.mark.processes

SMALL = 400  # bytes of a bucket: several buckets, and some parameters that are larger than one

FORMS = {
    "naive": (NaiveDataParallel, {}),
    "bucketed": (BucketedDataParallel, {"bucket_bytes": SMALL}),
    "overlapped": (OverlappedDataParallel, {"bucket_bytes": SMALL}),
    "overlapped, one bucket": (OverlappedDataParallel, {}),
}


def trained(communicator, form, name, parts=1):
    """All parameters after training by this rank and the others. Only rank 0 starts with those of seed 0."""
    make, options = OPTIMIZERS["momentum"]
    kind, more = FORMS[form]
    with kind(made(name, seed=communicator.rank), communicator, **more) as model:
        optimizer = make([p for p in model.parameters() if p.requires_grad], **options)
        train(model, optimizer, communicator, parts)
        return flat(model.module)


CASES = [(form, size, 1) for form in FORMS for size in (1, 2, 3)]
CASES += [(form, 3, 2) for form in ("naive", "bucketed")]  # gradients of two backward passes add up


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(("form", "size", "parts"), CASES)
def test_parallel_equals_serial_from_rank_0s_parameters(form, name, size, parts):
    expected = by_one_process(made(name), "momentum", size)
    for parameters in threads.run(size, lambda communicator: trained(communicator, form, name, parts)):
        torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_processes_over_tcp_train_what_one_process_trains(form):
    expected = by_one_process(made("tied"), "momentum", 3)
    for parameters in on_ranks(3, trained, {"form": form, "name": "tied"}).values:
        torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-12)


def one_step(communicator, form, module):
    """A model whose traffic is that of one step alone."""
    kind, options = FORMS[form]
    with kind(module, communicator, **options) as model:
        ((inputs, _),) = batches(communicator.size, steps=1)
        communicator.traffic.reset()
        model(share(inputs, communicator.rank)).sum().backward()
        model.synchronise()
        return model


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_sends_what_a_ring_sends_and_buckets_make_fewer_messages(form, size):
    def program(communicator):
        # All divisible by 4.
        module = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 4)).double()
        model = one_step(communicator, form, module)
        buckets = len(getattr(model, "buckets", range(6)))
        traffic = communicator.traffic
        assert traffic.messages_sent.sum() == 2 * (size - 1) * buckets
        return int(traffic.bytes_sent.sum()), buckets

    for sent, buckets in threads.run(size, program):
        assert sent == ring_bytes_sent(size, 8 * (5 * 8 + 8 + 8 * 8 + 8 + 8 * 4 + 4))
        assert buckets == {"naive": 6, "overlapped, one bucket": 1}.get(form, 2)


def test_frozen_parameters_and_buffers_are_rank_0s_at_the_start():
    def program(communicator):
        module = nn.BatchNorm1d(3).double()
        module.running_mean += communicator.rank + 5
        module.register_buffer("ones", torch.ones(1).expand(4))  # whose numbers share memory
        module.weight.requires_grad = False
        with torch.no_grad():
            module.weight += communicator.rank + 1
        NaiveDataParallel(module, communicator)
        return torch.cat([module.running_mean, module.weight.detach()])

    for found in threads.run(3, program):
        assert found.tolist() == [5, 5, 5, 2, 2, 2]


def test_a_parameter_that_is_not_contiguous_is_broadcast_and_reduced():
    def program(communicator):
        module = nn.Linear(5, 3, bias=False).double()
        module.weight.data = torch.arange(15.0).double().view(5, 3).t() * (1 + communicator.rank)
        model = one_step(communicator, "naive", module)
        assert module.weight.data.tolist() == torch.arange(15.0).view(5, 3).t().tolist()
        return model.module.weight.grad

    first, second = threads.run(2, program)
    assert torch.equal(first, second)
    assert first.abs().sum() > 0


class Branches(nn.Module):
    """Which of two layers is used depends on the rank."""

    def __init__(self, rank):
        super().__init__()
        self.left, self.right = (nn.Linear(5, 3).double() for _ in range(2))
        self.rank = rank

    def forward(self, inputs):
        """Outputs of shape (batch, 3)."""
        return (self.left if self.rank == 0 else self.right)(inputs)


@pytest.mark.parametrize("form", FORMS)
def test_an_unused_parameter_is_an_error_that_names_it_and_the_other_ranks_hear_of_it(form):
    def program(communicator):
        one_step(communicator, form, Branches(communicator.rank))

    with pytest.raises(
        UnusedParameters, match=r"(left|right)\.weight, .*on rank \d, which must send every gradient"
    ):
        threads.run(2, program)


def test_an_embedding_that_each_rank_would_shorten_elsewhere_is_refused():
    def program(communicator):
        with pytest.raises(ValueError, match=r"max_norm of embedding '' is 0\.5; it must be None"):
            NaiveDataParallel(nn.EmbeddingBag(3, 2, max_norm=0.5), communicator)
        assert not communicator.traffic.bytes_sent.any()

    threads.run(2, program)


def test_a_second_backward_pass_during_which_buckets_would_travel_is_refused():
    def program(communicator):
        with OverlappedDataParallel(made("plain"), communicator) as model:
            for _ in range(2):
                model(torch.ones(2, 5).double()).sum().backward()

    with pytest.raises(RuntimeError, match=r"before synchronise\(\).*BucketedDataParallel"):
        threads.run(1, program)


@pytest.mark.parametrize("form", FORMS)
def test_a_rank_that_fails_is_named_by_the_others_and_leaves_no_thread(form):
    heard = []

    def program(communicator):
        kind, options = FORMS[form]
        with kind(made("plain"), communicator, **options) as model:
            if communicator.rank == 1:
                raise ValueError("made up")
            model(torch.ones(2, 5).double()).sum().backward()
            try:
                model.synchronise()
            except PeerDied as death:
                heard.append(death)
                raise

    with pytest.raises((ValueError, PeerDied)):
        threads.run(3, program)
    assert [death.rank for death in heard] == [1, 1]
    assert "ring_all_reduce" in str(heard[0])
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("workshop-communication")
    ]


def test_a_bucket_has_one_dtype_and_a_limit():
    sizes = {"a": torch.zeros(10), "b": torch.zeros(1, dtype=torch.float64), "c": torch.zeros(100)}
    parameters = {name: nn.Parameter(each) for name, each in sizes.items()}
    assert [[*each] for each in buckets_of(parameters, 10_000)] == [["c"], ["b"], ["a"]]
    with pytest.raises(ValueError, match="bucket_bytes is 0; it must be above zero"):
        buckets_of(parameters, 0)


@pytest.mark.parametrize("limit", [1, 40, 100, 160, 10_000])
def test_buckets_are_those_of_pytorchs_own_function(limit):
    gradients = [torch.zeros(numbers) for numbers in (10, 1, 25, 15, 15, 3, 40, 9)]
    expected, _ = distributed._compute_bucket_assignment_by_size(gradients, [limit], [False] * len(gradients))
    named = {str(index): nn.Parameter(each) for index, each in reversed([*enumerate(gradients)])}
    assert [[*map(int, bucket)] for bucket in buckets_of(named, limit)] == expected
