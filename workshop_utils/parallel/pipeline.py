"""Runs any pipeline schedule between real ranks, or in virtual time: passes, and the messages between them.

    is_last = rank == communicator.size - 1
    stages = {rank: ModuleStage(parts[rank], None if rank else tokens_of, loss_of if is_last else None)}
    timeline = run(one_f_one_b(communicator.size, 8), stages, communicator, (4, 48, 64))

`program` turns a schedule into what one rank does, step after step; `run` does it. A stage is anything with `forward`
and `backward`, and for schedules that split their backward passes `weight`: `ModuleStage` holds a part of a PyTorch
model, `EmulatedStage` only spends the time that one would take.

**Why this cannot deadlock**, although every message is sent and received by calls that wait. Each transfer has a
moment, from when `schedule.predict` has its contents ready to when it has them due. All transfers and passes, of all
ranks, are thereby in one order, and each rank keeps to it: so the first of them that is not done can always be done.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from workshop_utils.comm.communicator import Array, Communicator
from workshop_utils.parallel.deferred import DeferredWeights
from workshop_utils.parallel.schedule import Pass, Schedule, Timed, check_weight_seconds, predict


class Exchange(NamedTuple):
    """Results that cross at once: of `sent` to rank `to`, of `received` from rank `source`; or one of them."""

    to: int | None = None
    sent: Pass | None = None
    source: int | None = None
    received: Pass | None = None


@functools.lru_cache(64)  # a step of training runs the same program as the one before
def program(schedule: Schedule, rank: int) -> tuple[Pass | Exchange, ...]:
    """What `rank` does, in order: its passes, and the transfers that bring and take their results.

    Raises:
        ScheduleError: if passes wait for each other for ever.
    """
    timeline = predict(schedule, schedule.chunks, 2 * schedule.chunks)  # whole numbers, so that ties are ties
    due = {timed.each: timed.start for timed in timeline}
    ranks = range(schedule.ranks)
    starts = [sorted(timed.start for timed in timeline if timed.rank == each) for each in ranks]
    steps: list[tuple[tuple[float, bool, Pass], Pass | Exchange]] = []
    for timed in timeline:
        if timed.rank == rank:
            steps.append(((timed.start, True, timed.each), timed.each))
        consumer = schedule.consumer(timed.each)
        here, there = timed.rank, rank if consumer is None else schedule.rank_of(consumer.stage)
        if consumer is None or here == there or rank not in (here, there):
            continue
        moment = _moment(timed.end, due[consumer], starts[here], starts[there])
        crossing = Exchange(there, timed.each) if rank == here else Exchange(source=here, received=timed.each)
        steps.append(((moment, False, timed.each), crossing))  # before passes of the same time
    return tuple(_at_once([step for _, step in sorted(steps, key=lambda entry: entry[0])]))


def _moment(ready: float, due: float, sender: Sequence[float], receiver: Sequence[float]) -> float:
    """When a result crosses that is `ready` at one time and `due` at another; passes begin at the times given.

    Of the sender's pauses from `ready` to `due` it is the first after which the receiver begins no other pass until
    `due`, so that it need not wait for what it does not need yet; where there is none, the last.
    """
    other_passes = receiver[: bisect_left(receiver, due)]
    pauses = [ready, *sender[bisect_right(sender, ready) : bisect_right(sender, due)]]
    return next((pause for pause in pauses if not other_passes or pause > other_passes[-1]), pauses[-1])


def _at_once(steps: Sequence[Pass | Exchange]) -> list[Pass | Exchange]:
    """A transfer out and one in that stand side by side become one, so that both directions carry at once."""
    merged: list[Pass | Exchange] = []
    for step in steps:
        last = merged[-1] if merged else None
        if not (isinstance(step, Exchange) and isinstance(last, Exchange)):
            merged.append(step)
        elif step.sent is None and last.received is None:
            merged[-1] = last._replace(source=step.source, received=step.received)
        elif step.received is None and last.sent is None:
            merged[-1] = last._replace(to=step.to, sent=step.sent)
        else:
            merged.append(step)
    return merged


class Stage(Protocol):
    """A part of a model. Arrays that go in and out have the shape of `run`'s messages."""

    def forward(self, microbatch: int, incoming: Array | None) -> Array | None:
        """The activations for the next stage; None in and out at the ends of the pipeline."""

    def backward(self, microbatch: int, incoming: Array | None) -> Array | None:
        """The gradient for the stage before, from that of this stage's activations."""

    def weight(self, microbatch: int) -> None:
        """What `backward` has left to do, in a schedule that splits."""


def run(
    schedule: Schedule,
    stages: Mapping[int, Stage],
    communicator: Communicator,
    shape: tuple[int, ...],
    dtype: Any = np.float32,
    allocate: Callable[..., Array] = np.empty,
) -> list[Timed]:
    """Run this rank's part of `schedule`; all ranks of `communicator` call it.

    Args:
        schedule: for as many ranks as `communicator` has.
        stages: this rank's stages by number.
        communicator: whose ranks are the pipeline; its clock is the timeline's.
        shape, dtype: of every message: the activations of one microbatch between two stages, or their gradient.
        allocate: makes the arrays that messages are received into.

    Returns:
        When each pass of this rank began and ended.

    Raises:
        ValueError: if schedule and communicator differ in size, or `stages` are not those of this rank, or `is_split`
            of a stage that has it is not that of the schedule; while it runs, if what a stage gives has another shape,
            or what is to be differentiated is not one number.
    """
    if schedule.ranks != communicator.size:
        given = f"schedule {schedule.name!r} is for {schedule.ranks} ranks"
        raise ValueError(f"{given}; the communicator has {communicator.size}")
    due = list(schedule.stages_of(communicator.rank))
    if sorted(stages) != due:
        right = f"rank {communicator.rank} must have stages {due} of {schedule.stages}"
        raise ValueError(f"stages is {sorted(stages)}; {right}")
    for number, each in stages.items():
        if (is_split := getattr(each, "is_split", schedule.is_split)) != schedule.is_split:
            right = f"schedule {schedule.name!r} needs {schedule.is_split}; EmulatedStages with weight_seconds split"
            raise ValueError(f"is_split of stage {number} is {is_split}; {right}")
    for each in stages.values():
        if isinstance(each, ModuleStage):
            each.losses.clear()
    shape, results = tuple(shape), dict[Pass, Any]()
    timeline: list[Timed] = []
    for step in program(schedule, communicator.rank):
        if isinstance(step, Exchange):
            outgoing = None if step.sent is None else results.pop(step.sent).reshape(-1)
            into = None if step.received is None else allocate(shape, dtype)
            communicator.send_recv(step.to, outgoing, step.source, None if into is None else into.reshape(-1))
            if step.received is not None:
                results[step.received] = into
            continue
        source = schedule.source(step)
        incoming = None if source is None else results.pop(source)
        start = communicator.now()
        stage = stages[step.stage]
        if step.kind == "weight":
            stage.weight(step.microbatch)
        else:
            act = stage.forward if step.kind == "forward" else stage.backward
            results[step] = result = act(step.microbatch, incoming)
            made = getattr(result, "shape", None)
            if schedule.consumer(step) is not None and made != shape:
                gave = "nothing" if result is None else f"an array of shape {made}" if made else repr(result)
                raise ValueError(f"shape is {shape}; {step.kind} of stage {step.stage} gave {gave}")
        timeline.append(Timed(communicator.rank, step, start, communicator.now()))
    return timeline


Loss = Callable[[Tensor, int], Tensor]


class ModuleStage:
    """A part of a PyTorch model. Gradients of parameters add up in `.grad` until the caller clears them.

    Args:
        module: takes and gives one tensor; it must not change in place what it takes.
        inputs: the model's input for a microbatch; for the first stage.
        loss: what is differentiated, from the last stage's output and the microbatch's number; None if the module
            gives it. To train on the mean over a batch of equal microbatches, divide by their number.
        is_split: whether `backward` leaves the gradients of linear layers' weights to `weight`; as the schedule.

    Attributes:
        losses: of the latest `run`, by microbatch, in the last stage; left out elsewhere.
        activations: by microbatch, input and output until the backward pass.
        deferred: by microbatch, what is left to `weight`.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Callable[[int], Tensor] | None = None,
        loss: Loss | None = None,
        is_split: bool = False,
    ) -> None:
        self.module, self.inputs, self.loss, self.is_split = module, inputs, loss, is_split
        self.losses: dict[int, float] = {}
        self.deferred: dict[int, DeferredWeights] = {}
        self.activations: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, microbatch: int, incoming: Array | None) -> Array | None:
        if incoming is None:
            if self.inputs is None:
                raise ValueError("inputs is None; the first stage of a pipeline needs them")
            taken = self.inputs(microbatch)
        else:
            taken = torch.from_numpy(incoming).requires_grad_()
        if self.is_split:
            self.deferred[microbatch] = DeferredWeights()
        with self.deferred.get(microbatch, nullcontext()):
            given = self.module(taken)
        if self.loss is not None:
            given = self.loss(given, microbatch)
            self.losses[microbatch] = given.item()
        self.activations[microbatch] = taken, given
        return None if self.loss is not None else given.detach().contiguous().numpy()

    def backward(self, microbatch: int, incoming: Array | None) -> Array | None:
        taken, given = self.activations.pop(microbatch)
        if incoming is None and given.numel() != 1:
            raise ValueError(
                "loss is None; the last stage of a pipeline needs one, or a module that gives a number"
            )
        torch.autograd.backward(given, None if incoming is None else torch.from_numpy(incoming))
        if self.is_split:
            left = {each.gradient.untyped_storage().data_ptr() for each in self.deferred[microbatch].products}
            # Autograd may share memory, and add the next gradient in place.
            for each in self.module.parameters():
                if each.grad is not None and each.grad.untyped_storage().data_ptr() in left:
                    each.grad = each.grad.clone()
        return None if taken.grad is None else taken.grad.contiguous().numpy()

    def weight(self, microbatch: int) -> None:
        self.deferred.pop(microbatch).add_to_gradients()


class EmulatedStage:
    """Takes as long as it is told and computes nothing: a core each for ranks that have none.

    Args:
        communicator: on a simulated clock its time passes, otherwise this process sleeps.
        forward_seconds, backward_seconds: of one microbatch through this stage.
        message: what goes out of each pass, of the shape of `run`'s messages.
        weight_seconds: the part of `backward_seconds` that is left to `weight`: above 0 for schedules that split
            backward passes, and for no others.

    Attributes:
        is_split: whether there is such a part.

    Raises:
        ValueError: if `weight_seconds` is negative, or more than `backward_seconds`.
    """

    def __init__(
        self,
        communicator: Communicator,
        forward_seconds: float,
        backward_seconds: float,
        message: Array,
        weight_seconds: float = 0.0,
    ) -> None:
        check_weight_seconds(weight_seconds, backward_seconds)
        self._communicator, self._message, self.is_split = communicator, message, weight_seconds > 0
        self._forward_seconds, self._weight_seconds = forward_seconds, weight_seconds
        self._backward_seconds = backward_seconds - weight_seconds

    def forward(self, microbatch: int, incoming: Array | None) -> Array | None:
        self._communicator.sleep(self._forward_seconds)
        return self._message

    def backward(self, microbatch: int, incoming: Array | None) -> Array | None:
        self._communicator.sleep(self._backward_seconds)
        return self._message

    def weight(self, microbatch: int) -> None:
        self._communicator.sleep(self._weight_seconds)
