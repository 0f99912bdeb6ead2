"""Our message passing and parallelism beside PyTorch's over gloo: all-reduce, and a step of each kind of training."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from comparison import AS_THEORY, WITHIN_A_TENTH, Bar, Row

from workshop_utils.comm.all_to_all import all_to_all_seconds, direct_all_to_all
from workshop_utils.comm.communicator import Communicator
from workshop_utils.comm.simulated import Link, Shape, simulate
from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local

WORKERS = (2, 4)
KIB, MIB = 1024, 1024 * 1024
# Bytes, algorithm, calls in a sample, and how many times as fast as gloo it must be.
ALL_REDUCES = (
    (4 * KIB, "direct", 60, 3.0),
    (64 * KIB, "direct", 30, 3.0),
    (MIB, "ring", 8, 1.0),
    (16 * MIB, "ring", 3, 1.0),
    (64 * MIB, "ring", 1, 1.0),
)
# Subject, case, width of the layers.
STEPS = (
    ("DDP, gradients of 0.4 MB", "ddp", 128),
    ("DDP, gradients of 13 MB", "ddp", 1024),
    ("FSDP by block, GPT of 5 MB", "fsdp", 128),
    ("FSDP by block, GPT of 76 MB", "fsdp", 512),
    ("pipeline, GPipe", "gpipe", 0),
    ("pipeline, 1F1B", "one_f_one_b", 0),
    ("pipeline, ZBV", "zbv", 0),
    ("tensor-parallel blocks", "tensor", 0),
)


def all_reduce(quick: bool) -> Iterator[Row]:
    """float32, in place, summed; each call after a barrier. The algorithm is the one that a size is for."""
    for workers in WORKERS[:1] if quick else WORKERS:
        for nbytes, algorithm, calls, times in ALL_REDUCES[:2] if quick else ALL_REDUCES:
            name = f"{nbytes // KIB} KiB" if nbytes < MIB else f"{nbytes // MIB} MiB"
            pairs = measured(algorithm, workers, 1 if quick else 15, nbytes, calls)
            subject = f"all-reduce of {name} among {workers}: {algorithm}, beside gloo"
            yield Row(subject, pairs, "ms", Bar(low=times), times_faster=True)


def all_to_all(quick: bool) -> Iterator[Row]:
    """float32, so much from each rank, own part included; among 1,000 ranks on the simulated clock, beside theory."""
    for workers in WORKERS[:1] if quick else WORKERS:
        for case in ("all_to_all", "uneven_all_to_all"):
            for nbytes, calls in ((64 * KIB, 30), (MIB, 8), (16 * MIB, 3))[: 1 if quick else 3]:
                name = f"{nbytes // KIB} KiB" if nbytes < MIB else f"{nbytes // MIB} MiB"
                pairs = measured(case, workers, 1 if quick else 15, nbytes, calls)
                subject = f"{case.replace('_', ' ')} of {name} among {workers}, beside gloo"
                yield Row(subject, pairs, "ms", WITHIN_A_TENTH)
    size, nbytes, link = 100 if quick else 1000, MIB, Link.of("10Gbit", "50us")

    def program(communicator: Communicator) -> None:
        parts = [Shape(nbytes // size, "uint8")] * size
        direct_all_to_all(communicator, parts, parts)

    ours = simulate(size, program, link).seconds
    theory = all_to_all_seconds(size, nbytes, link.latency_seconds, link.bandwidth_bytes_per_second)
    pairs = [(1000 * ours, 1000 * theory)]
    yield Row(f"all to all of 1 MiB among {size} in virtual time, beside theory", pairs, "ms", AS_THEORY)


def steps(quick: bool) -> Iterator[Row]:
    """The same model, values and batches in the same processes, a step of ours and of PyTorch's in turn."""
    for workers in WORKERS[:1] if quick else WORKERS:
        for subject, case, width in STEPS[:1] if quick else STEPS:
            pairs = measured(case, workers, 1 if quick else 20, width)
            yield Row(f"{subject}, {workers} ranks, beside PyTorch", pairs, "ms", WITHIN_A_TENTH)


def attention(quick: bool) -> Iterator[Row]:
    """Forward and backward in float64: the kernel's bytes, and the largest error in 1e-12 of the largest entry."""
    for workers in (4,) if quick else (2, 3, 4):
        for how in ("ring",) if quick else ("ring", "ulysses"):
            subject, length = f"{how} attention among {workers}", 240
            sent = measured(f"{how}_attention_bytes", workers, 1 if quick else 5, length)
            yield Row(f"{subject}: kernel's bytes, beside the formula", sent, "B", Bar(0.98, 1.02))
            errors = measured(f"{how}_attention_error", workers, 1, length)
            yield Row(f"{subject}: error, beside 1e-12", errors, "ppt", Bar(high=1))


def pipelines(quick: bool) -> Iterator[Row]:
    """Per cent of their time in which four ranks work on emulated devices: not idle, within 3 points of predicted."""
    samples = 1 if quick else 7
    for schedule, idle in (("zb_h1", 3 / 27), ("zbv", 3 / 51)):
        pairs = measured(f"{schedule} as predicted", 4, samples)
        subject = f"work of {schedule}, 8 microbatches, 4 ranks, beside predicted"
        yield Row(subject, pairs, "%", Bar(1 - 0.03 / (1 - idle), 1 + 0.03 / (1 - idle)))
    pairs = measured("zbv beside one_f_one_b", 4, samples)
    yield Row("work of zbv, 8 microbatches, 4 ranks, beside 1F1B", pairs, "%", Bar(low=1.1))


def sharded_memory(quick: bool) -> Iterator[Row]:
    """By how many MB a process grows, with shards, their optimizer, and what a step takes beside them."""
    for workers in WORKERS[:1] if quick else WORKERS:
        for width in (256, 512):
            pairs = measured("fsdp_memory", workers, 1 if quick else 7, width)
            subject = f"memory of FSDP by block, width {width}, {workers} ranks, beside PyTorch"
            yield Row(subject, pairs, "MB", WITHIN_A_TENTH)


def measured(
    case: str, workers: int, samples: int, amount: int = 0, calls: int = 1
) -> list[tuple[float, float]]:
    """Of ours and theirs, a pair a sample: milliseconds, or what the case gives."""
    with tempfile.TemporaryDirectory(prefix="workshop-bench-") as folder:
        job = TrainingJob(
            name="benchmark",
            folder=Path(__file__).parent,
            script="ranks.py",
            strategy="ring",
            workers=workers,
            arguments={
                "case": case, "amount": amount, "samples": samples, "calls": calls, "store": f"{folder}/gloo",
            },
        )  # fmt: skip
        with Local(warm=True).launch(job) as run:
            records = run.wait().records
    return [(record["ours"], record["theirs"]) for record in records]
