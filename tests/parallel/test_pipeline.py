"""Pipelines: equal to one process whatever the schedule, with as many bytes as the formula says."""

import copy
import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from workshop_utils.comm import threads
from workshop_utils.comm.shape import Shape
from workshop_utils.comm.simulated import Link, simulate
from workshop_utils.parallel.gpt import GPT, GPTSizes, batch_of, cross_entropy, gradient_error
from workshop_utils.parallel.pipeline import EmulatedStage, ModuleStage, run
from workshop_utils.parallel.schedule import SCHEDULES, bubble, held, predict, schedule_of

pytestmark = pytest.mark.processes

SIZES = GPTSizes(layers=8, width=12, heads=3, sequence=7, vocabulary=256)
TEXT = bytes(range(256)) * 3

CASES = [(name, ranks, 1) for name in ("naive", "gpipe", "one_f_one_b", "zb_h1") for ranks in (1, 2, 3, 4)]
CASES += [("zbv", ranks, 1) for ranks in (1, 2, 3, 4)]
CASES += [("interleaved", 1, 2), ("interleaved", 2, 2)]


class Watched(ModuleStage):
    """A stage that counts for how many microbatches it keeps activations."""

    most = 0

    def forward(self, microbatch, incoming):
        outgoing = super().forward(microbatch, incoming)
        self.most = max(self.most, len(self.activations), len(self.deferred))
        return outgoing


def stages_of_rank(schedule, rank, tokens, targets):
    parts, count = GPT(SIZES, dtype=torch.float64).stages(schedule.stages), schedule.microbatches

    def inputs(microbatch):
        return tokens.chunk(count)[microbatch]

    def loss_of(logits, microbatch):
        return cross_entropy(logits, targets.chunk(count)[microbatch]) / count

    last = schedule.stages - 1
    return {
        stage: Watched(
            parts[stage], None if stage else inputs, loss_of if stage == last else None, schedule.is_split
        )
        for stage in schedule.stages_of(rank)
    }


@pytest.mark.parametrize(("name", "ranks", "chunks"), CASES)
def test_gradients_loss_and_bytes_are_those_of_one_process_and_of_the_formula(name, ranks, chunks):
    microbatches = 4 if name == "interleaved" else 3
    schedule = schedule_of(name, ranks, microbatches, chunks)
    chunks, turns = schedule.chunks, 2 if schedule.is_v else 1
    tokens, targets = batch_of(TEXT, step=1, batch=2 * microbatches, sequence=SIZES.sequence)
    whole = GPT(SIZES, dtype=torch.float64)
    whole_loss = cross_entropy(whole(tokens), targets)
    whole_loss.backward()
    gradients = whole.gradients().stages(schedule.stages)
    largest = max(parameter.grad.abs().max().item() for parameter in whole.parameters())
    shape = (2, SIZES.sequence, SIZES.width)

    def rank_main(communicator):
        stages = stages_of_rank(schedule, communicator.rank, tokens, targets)
        run(schedule, stages, communicator, shape, np.float64)
        for stage, each in stages.items():
            assert gradient_error(each.module, gradients[stage]) <= 1e-12 * largest
            left = [*each.activations, *each.deferred]
            assert not left, "activations are let go of after their backward pass"
        if schedule.stages - 1 in stages:
            assert sum(stages[schedule.stages - 1].losses.values()) == pytest.approx(
                whole_loss.item(), abs=1e-12
            )
        ends = (communicator.rank == 0) + (communicator.rank == ranks - 1)
        sent = (2 * chunks - turns * ends) * microbatches * 8 * int(np.prod(shape)) * (ranks > 1)
        assert communicator.traffic.bytes_sent.sum() == sent
        if chunks == 1:
            assert next(iter(stages.values())).most == held(schedule.passes[communicator.rank])

    threads.run(ranks, rank_main)


def test_losses_are_those_of_the_latest_run():
    def alone(communicator):
        stage = ModuleStage(
            nn.Linear(1, 1), lambda _: torch.ones(1), lambda given, number: number + 0 * given.sum()
        )
        for microbatches in (4, 2):
            run(schedule_of("gpipe", 1, microbatches), {0: stage}, communicator, (1,))
        assert stage.losses == {0: 0.0, 1: 1.0}

    threads.run(1, alone)


@pytest.mark.parametrize("latency", ["0us", "300us"])
@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "length", "most"),
    [
        ("naive", 3, 1, 25, 1.001),
        ("gpipe", 4, 1, 25, 1.001),
        ("one_f_one_b", 4, 1, 25, 1.001),
        ("interleaved", 3, 2, 25, 1.02),
        ("zb_h1", 4, 1, 25, 1.001),
        ("zbv", 3, 1, 25, 1.02),
        # Messages of 3 ms: this holds only if both directions carry at once, in pauses of both ranks.
        ("interleaved", 3, 2, 10_000_000, 1.2),
        ("zb_h1", 4, 1, 10_000_000, 1.05),
    ],
)
def test_in_virtual_time_the_pipeline_takes_as_long_as_predicted(name, ranks, chunks, length, most, latency):
    schedule = schedule_of(name, ranks, 6, chunks)
    cut, of_weights = schedule.chunks, 0.01 if schedule.is_split else 0.0

    def rank_main(communicator):
        stages = {
            stage: EmulatedStage(communicator, 0.01 / cut, 0.02 / cut, Shape(length), of_weights / cut)
            for stage in schedule.stages_of(communicator.rank)
        }
        return run(schedule, stages, communicator, (length,), allocate=Shape)

    link = Link.of("100Gbit", latency)
    simulation = simulate(ranks, rank_main, link)
    measured = [timed for timeline in simulation.results for timed in timeline]
    predicted = predict(schedule, 0.01, 0.02, link.seconds(Shape(length).nbytes))
    if length == 25 and latency == "0us":
        assert bubble(measured) == pytest.approx(bubble(predicted), rel=1e-3)
    takes, due = (max(timed.end for timed in timeline) for timeline in (measured, predicted))
    # Transfers come in a fixed order, so that a rank may wait for a message that it does not need yet.
    assert due - 1e-9 <= takes <= most * due


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_no_schedule_deadlocks_where_a_send_lasts_until_its_message_is_received(name, ranks):
    schedule = schedule_of(name, ranks, 2 * ranks, 2 if name == "interleaved" else 1)

    def rank_main(communicator):
        message = np.zeros(1, np.float32)
        stages = {
            stage: EmulatedStage(communicator, 0, 1e-9, message, 1e-9 * schedule.is_split)
            for stage in schedule.stages_of(communicator.rank)
        }
        run(schedule, stages, communicator, (1,))

    threads.run(ranks, rank_main, timeout_seconds=5, is_buffered=False)


def test_stages_and_messages_that_are_not_those_of_the_schedule_are_refused():
    def program(communicator):
        message = np.zeros(1, np.float32)
        stages = {communicator.rank: EmulatedStage(communicator, 0, 0, message)}
        with pytest.raises(ValueError, match="'gpipe' is for 3 ranks; the communicator has 2"):
            run(schedule_of("gpipe", 3, 1), stages, communicator, (1,))
        split = {communicator.rank: ModuleStage(nn.Identity(), is_split=True)}
        with pytest.raises(ValueError, match=r"is_split of stage . is True; schedule 'gpipe' needs False"):
            run(schedule_of("gpipe", 2, 1), split, communicator, (1,))
        left = {communicator.rank: EmulatedStage(communicator, 0, 1, message, 0.5)}
        with pytest.raises(ValueError, match=r"is_split of stage . is True; schedule 'gpipe' needs False"):
            run(schedule_of("gpipe", 2, 1), left, communicator, (1,))
        with pytest.raises(ValueError, match=r"is_split of stage . is False; schedule 'zb_h1' needs True"):
            run(schedule_of("zb_h1", 2, 1), stages, communicator, (1,))
        for too in (-0.1, 0.2, math.nan):
            with pytest.raises(ValueError, match=f"weight_seconds is {too}; it must be .* at most .*, 0.1"):
                EmulatedStage(communicator, 0, 0.1, message, too)
        with pytest.raises(ValueError, match=r"stages is \[7\]; rank . must have stages"):
            run(schedule_of("gpipe", 2, 1), {7: stages[communicator.rank]}, communicator, (1,))

    def alone(communicator):
        stage = ModuleStage(nn.Identity(), loss=lambda given, _: given.sum())
        with pytest.raises(ValueError, match="inputs is None; the first stage of a pipeline needs them"):
            run(schedule_of("gpipe", 1, 1), {0: stage}, communicator, (1,))
        for size in (1, 2):  # a module may give what is differentiated
            stage = ModuleStage(layer := nn.Linear(3, size), lambda _: torch.ones(3))
            with (
                nullcontext()
                if size == 1
                else pytest.raises(ValueError, match="loss is None; the last stage")
            ):
                run(schedule_of("gpipe", 1, 1), {0: stage}, communicator, (1,))
            assert (layer.weight.grad is not None) == (size == 1)
        two = dict.fromkeys((0, 1), EmulatedStage(communicator, 0, 0, np.zeros((2, 3))))
        with pytest.raises(ValueError, match=r"shape is \(3, 2\); forward of stage 0 gave .* shape \(2, 3\)"):
            run(schedule_of("interleaved", 1, 1, 2), two, communicator, (3, 2))
        two[0] = ModuleStage(nn.Identity(), lambda _: torch.zeros(1), lambda given, _: given.sum())
        with pytest.raises(ValueError, match=r"shape is \(3, 2\); forward of stage 0 gave nothing"):
            run(schedule_of("interleaved", 1, 1, 2), two, communicator, [3, 2])

    threads.run(2, program)
    threads.run(1, alone)


class Positions(nn.Module):
    """Its position's gradient is a view of what the linear layer's weight still waits for, with one sequence."""

    def __init__(self):
        super().__init__()
        self.patch, self.position = nn.Linear(4, 4), nn.Parameter(torch.zeros(5, 4))

    def forward(self, x):
        return self.patch(x) + self.position.unsqueeze(0)


def test_a_gradient_that_shares_memory_with_one_that_a_weight_waits_for_is_not_added_to_in_place():
    sequences, parts = torch.randn(4, 1, 5, 4), [Positions(), Positions()]

    def gradients(communicator):
        loss = (lambda given, _: given.square().sum()) if communicator.rank else None
        of_name = []
        for name in ("gpipe", "zb_h1"):
            part = copy.deepcopy(parts[communicator.rank])
            stage = ModuleStage(part, sequences.__getitem__, loss, is_split=name == "zb_h1")
            run(schedule_of(name, 2, 4), {communicator.rank: stage}, communicator, (1, 5, 4))
            of_name.append([each.grad for each in part.parameters()])
        return [torch.allclose(one, other, atol=1e-5) for one, other in zip(*of_name, strict=True)]

    assert threads.run(2, gradients) == [[True] * 3] * 2
