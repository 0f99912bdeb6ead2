"""Lesson 12: who decides and who trains on a cluster, and what an operator makes of each kind of job."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workshop_utils.plots import drawing, style

CLUSTER = "torch_ddp"  # what the control plane runs is framed in this colour
STORE = "#B9A44C"
WIDTH, GAP = 2.35, 0.2  # of a kind's column


def planes() -> Figure:
    """The control plane, which keeps what was asked for, and the data plane, in which pods train."""
    figure, axes = drawing.canvas(10.6, 5.5)
    drawing.title(
        axes,
        "The control plane decides, the data plane trains: no gradient passes the API server",
        "1: you ask for a job, 2: its operator asks for pods, 3: each gets a node, 4: it starts, 5: gradients meet",
    )
    drawing.box(axes, (0.25, 2.95), 1.75, 1.45, colour="compute", filled=False)
    drawing.text(axes, (1.12, 4.1), "you", weight="bold")
    drawing.text(axes, (1.12, 3.53), "kubectl create -f\nor launch(job) → run", size=8.5)
    drawing.box(axes, (2.95, 2.95), 5.6, 1.65, colour=CLUSTER, filled=False)
    drawing.text(axes, (3.07, 4.38), "control plane", weight="bold", align="left")
    drawing.text(axes, (8.43, 4.38), "on EKS, AWS runs it", align="right", size=9, colour=style.QUIET)
    drawing.box(axes, (3.3, 3.15), 1.7, 0.98, "API server:\nasked by all", colour=CLUSTER, size=9)
    for bottom, words in ((3.7, "etcd: what is wanted"), (3.15, "scheduler: which node")):
        drawing.box(axes, (6.2, bottom), 2.15, 0.43, words, colour=CLUSTER, filled=False, size=9)
    drawing.arrow(axes, (5.0, 3.91), (6.2, 3.91), colour=CLUSTER, both_ways=True)
    drawing.arrow(axes, (5.0, 3.36), (6.2, 3.36), "3", both_ways=True)
    drawing.box(axes, (2.95, 0.25), 5.6, 2.3, colour="server", filled=False, dashed=True)
    drawing.text(axes, (3.07, 2.33), "data plane", weight="bold", align="left")
    drawing.text(axes, (8.43, 2.33), "you pay for its nodes", align="right", size=9, colour=style.QUIET)
    for node in range(2):
        left = 3.15 + 2.7 * node
        drawing.box(axes, (left, 0.4), 2.5, 1.65, colour="server", filled=False)
        drawing.text(axes, (left + 0.1, 1.86), f"node {node}: kubelet", align="left", size=9)
        words, colour = f"pod:\nworker {node}", f"worker {node}"
        drawing.box(axes, (left + 0.15, 0.65), 1.05, 0.75, words, colour=colour, size=9)
    drawing.box(
        axes, (4.45, 0.65), 1.1, 0.75, "pod: train-\ning operator", colour=CLUSTER, filled=False, size=8.5
    )
    drawing.arrow(axes, (2.0, 3.64), (3.3, 3.64), "1", label_at=(2.48, 3.78))
    drawing.arrow(axes, (4.9, 1.4), (4.3, 3.15), "2", both_ways=True, label_at=(4.28, 2.75))
    drawing.arrow(axes, (4.8, 3.15), (6.3, 2.05), "4", both_ways=True, label_at=(5.75, 2.75))
    drawing.arrow(axes, (3.85, 0.65), (6.5, 0.65), both_ways=True, bend=0.1, width=2.2)
    drawing.text(axes, (5.75, 0.68), "5", size=9, colour="send")
    drawing.box(axes, (9.0, 0.85), 1.35, 0.75, "ECR:\nimage", colour=STORE, size=9)
    drawing.arrow(axes, (9.0, 1.22), (8.35, 1.22), colour=STORE)
    words = "logs come back\nas 4 and 1"
    drawing.text(axes, (1.12, 2.6), words, size=9, colour=style.QUIET)
    return figure


KINDS: dict[str, tuple[tuple[tuple[str, str], ...], str, str]] = {
    # Pods with their colours; by what they meet; who starts the ranks.
    "TFJob": (
        (("chief-0", "chief"), ("ps-0", "server"), ("worker-0", "worker 0"), ("worker-1", "worker 1")),
        "TF_CONFIG",
        "every pod runs\nthe script",
    ),
    "PyTorchJob": (
        (("master-0 is rank 0", "worker 0"), ("worker-0 is rank 1", "worker 1")),
        "MASTER_ADDR, RANK",
        "every pod runs\nthe script",
    ),
    "MPIJob": (
        (("launcher", "chief"), ("worker-0: sshd", "worker 0"), ("worker-1: sshd", "worker 1")),
        "a hostfile, a key",
        "the launcher's mpirun,\nthrough ssh",
    ),
    "TrainJob": (
        (("node-0-0", "worker 0"), ("node-0-1", "worker 1")),
        "PET_NNODES, PET_…",
        "torchrun, in\nevery pod",
    ),
}  # fmt: skip


def kinds() -> Figure:
    """The pods of each kind of job, what tells them of each other, and who starts the ranks in them."""
    figure, axes = drawing.canvas(10.4, 4.7)
    drawing.title(
        axes,
        "One job description, four kinds: they differ in who starts the ranks, and in what these are told",
        "the pods that the operators make of it; in the frame, what they add to every pod",
    )
    for column, (kind, (pods, told, starter)) in enumerate(KINDS.items()):
        _kind(axes, 0.2 + (WIDTH + GAP) * column, kind, pods, told, starter)
    return figure


def _kind(
    axes: Axes, left: float, kind: str, pods: tuple[tuple[str, str], ...], told: str, starter: str
) -> None:
    middle = left + WIDTH / 2
    drawing.box(axes, (left, 0.2), WIDTH, 3.75, colour="compute", filled=False)
    drawing.text(axes, (middle, 3.73), kind, weight="bold", size=11)
    for row, (name, colour) in enumerate(pods):
        drawing.box(axes, (left + 0.2, 3.0 - 0.52 * row), WIDTH - 0.4, 0.42, name, colour=colour, size=9)
    drawing.box(axes, (left + 0.2, 0.95), WIDTH - 0.4, 0.4, told, colour=CLUSTER, filled=False, size=9)
    drawing.text(axes, (middle, 0.55), starter, size=9, colour=style.QUIET)


DRAWINGS = {"12_planes.svg": planes, "12_kinds.svg": kinds}
