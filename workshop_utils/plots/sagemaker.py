"""Lesson 11: where a training job runs, who does what on its hosts, and what threads and racks cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workshop_utils.plots import drawing, style

CLOUD = "torch_ddp"  # what AWS runs is framed in this colour
BUCKET = "#B9A44C"


def training_job() -> Figure:
    """What a launch sends, what SageMaker starts, and what comes back."""
    figure, axes = drawing.canvas(10.2, 4.4)
    drawing.title(
        axes,
        "Instances exist for as long as the job does",
        "1: source and data to S3, 2: the request, 3: instances start, load, train, 4: logs and model come back",
    )
    drawing.box(axes, (0.25, 1.2), 2.0, 1.5, colour="compute", filled=False)
    drawing.text(axes, (1.25, 2.4), "your machine", weight="bold")
    drawing.text(axes, (1.25, 1.85), "job.yaml, train.py\nplace.yaml\nlaunch(job) → run", size=9)
    drawing.box(axes, (3.0, 0.3), 6.95, 3.3, colour=CLOUD, filled=False)
    drawing.text(axes, (9.75, 3.38), "AWS, one region", align="right", size=9, colour=style.QUIET)
    drawing.box(axes, (3.3, 2.55), 1.75, 0.7, "S3 bucket:\nsource, data, model", colour=BUCKET, size=9)
    drawing.box(axes, (3.3, 1.6), 1.75, 0.7, "SageMaker:\nthe request", colour=CLOUD, size=9)
    drawing.box(axes, (3.3, 0.6), 1.75, 0.7, "CloudWatch:\na log for each host", colour="compute", size=9)
    drawing.box(axes, (6.1, 0.55), 2.25, 2.7, colour="server", filled=False, dashed=True)
    drawing.text(axes, (7.22, 3.05), "one subnet", size=9, colour=style.QUIET)
    for number in range(3):
        colour = f"worker {number}"
        drawing.box(
            axes,
            (6.3, 2.2 - 0.72 * number),
            1.85,
            0.58,
            f"algo-{number + 1}: container",
            colour=colour,
            size=9,
        )
    drawing.box(axes, (8.7, 1.6), 1.05, 0.7, "ECR:\nimage", colour="server", size=9)
    drawing.arrow(axes, (2.25, 2.35), (3.3, 2.9), "1", colour="send")
    drawing.arrow(axes, (2.25, 1.95), (3.3, 1.95), "2", colour="send")
    drawing.arrow(axes, (5.05, 1.95), (6.1, 1.95), "3", colour="send")
    drawing.arrow(axes, (5.05, 2.9), (6.1, 2.75), colour=BUCKET, both_ways=True)
    drawing.arrow(axes, (8.7, 1.95), (8.35, 1.95), colour="server")
    drawing.arrow(axes, (6.1, 0.95), (5.05, 0.95), colour="compute")
    drawing.arrow(axes, (3.3, 0.95), (2.25, 1.5), "4", colour="compute", label_at=(2.7, 1.38))
    return figure


def classic_mode() -> Figure:
    """Three hosts in the classic mode: a master that does not train, two workers, three servers."""
    figure, axes = drawing.canvas(9.6, 4.1)
    drawing.title(
        axes,
        "Three hosts: three servers, two workers, one master that does not train",
        "classic script mode with parameter servers; the toolkit starts a server beside the script on every host",
    )
    for number in range(3):
        left = 0.4 + 3.05 * number
        drawing.box(axes, (left, 0.45), 2.7, 2.55, colour="compute", filled=False)
        drawing.text(axes, (left + 0.12, 2.77), f"algo-{number + 1}", weight="bold", align="left")
        drawing.box(axes, (left + 0.3, 1.9), 2.1, 0.6, f"server {number}: port 2223", colour="server", size=9)
        name, colour = (
            ("script: master", "chief")
            if number == 0
            else (f"script: worker {number - 1}", f"worker {number - 1}")
        )
        drawing.box(
            axes, (left + 0.3, 0.65), 2.1, 0.6, f"{name}, port 2222", colour=colour, filled=number > 0, size=9
        )
    for worker in (1, 2):
        for server in range(3):
            start = (1.75 + 3.05 * worker, 1.25)
            drawing.arrow(
                axes,
                start,
                (1.75 + 3.05 * server, 1.9),
                colour=f"worker {worker - 1}",
                both_ways=True,
                width=1.2,
            )
    drawing.text(
        axes, (0.4, 0.2), "each worker reads from, and writes to, all servers; the master only hands out steps",
        align="left", size=9, colour=style.QUIET,
    )  # fmt: skip
    return figure


def network() -> Figure:
    """Why the instances of a job belong into one subnet."""
    figure, axes = drawing.canvas(10.2, 4.2)
    drawing.title(
        axes,
        "One subnet keeps a job's instances close; two may put half of them into another building",
        "a subnet belongs to one zone; SageMaker places a job's instances into any of the subnets that it is given",
    )
    for panel, (name, zones) in enumerate((("one subnet", (4,)), ("two subnets", (2, 2)))):
        left = 0.3 + 5.0 * panel
        drawing.box(axes, (left, 0.35), 4.6, 2.85, colour=CLOUD, filled=False)
        drawing.text(axes, (left + 0.12, 2.98), f"VPC with {name}", weight="bold", align="left")
        gap = 0.7  # between the zones
        width = (4.2 - gap * (len(zones) - 1)) / len(zones)
        host = 0
        for zone, count in enumerate(zones):
            x = left + 0.2 + (width + gap) * zone
            drawing.box(axes, (x, 0.95), width, 1.75, colour="server", filled=False, dashed=True)
            words = f"subnet in zone {'ab'[zone]}"
            drawing.text(axes, (x + 0.1, 2.5), words, align="left", size=9, colour=style.QUIET)
            step = (width - 0.16) / count
            for column in range(count):
                corner = (x + 0.12 + step * column, 1.45)
                drawing.box(
                    axes, corner, step - 0.08, 0.6, f"algo-{host + 1}", colour=f"worker {host}", size=8.5
                )
                host += 1
        drawing.box(axes, (left + 1.35, 0.47), 1.9, 0.36, "endpoint to S3", colour=BUCKET, size=8.5)
        if len(zones) > 1:
            ends = (left + 0.2 + width, 1.75), (left + 0.2 + width + gap, 1.75)
            drawing.arrow(axes, *ends, colour="send", both_ways=True, width=2.2)
            drawing.text(axes, (left + 0.2 + width + gap / 2, 1.4), "kilo-\nmetres", size=8.5, colour="send")
    return figure


STEPS = (
    (
        "1 · Create",
        "Console: SageMaker AI →\nNotebooks → Create",
        "or: the stack of\ntemplates/notebook.yaml",
    ),
    ("2 · Name", "distributed-training", "letters, digits, hyphens;\nno underscores"),
    ("3 · Role", "workshop-notebook", "a learner's rights only,\nnot AdministratorAccess"),
    ("4 · Terminal", "cd ~/SageMaker &&\ngit clone REPOSITORY", "this folder outlives\na stop"),
    (
        "5 · Kernel",
        "conda env create -p ../env\n-f environment.yml",
        "once; then ipykernel install,\nand choose that kernel",
    ),
    ("6 · Stop", "Actions → Stop", "it is paid for until then;\nidle for an hour: stopped"),
)


def notebook_instance() -> Figure:
    """Six steps to a notebook instance with the workshop on it."""
    figure, axes = drawing.canvas(10.4, 4.3)
    drawing.title(
        axes,
        "A notebook instance in six steps",
        "what you type or choose stands in the frame; below it, what to mind",
    )
    for number, (name, typed, mind) in enumerate(STEPS):
        left, bottom = 0.3 + 3.38 * (number % 3), 1.95 - 1.72 * (number // 3)
        drawing.box(axes, (left, bottom), 3.1, 1.5, colour="compute", filled=False)
        drawing.text(axes, (left + 0.12, bottom + 1.29), name, weight="bold", align="left")
        drawing.box(axes, (left + 0.12, bottom + 0.58), 2.86, 0.55, typed, colour=CLOUD, filled=False, size=9)
        drawing.text(axes, (left + 1.55, bottom + 0.28), mind, size=8.5, colour=style.QUIET)
    return figure


def threads(table: pd.DataFrame, axes: Axes | None = None) -> Axes:
    """How many times as fast a worker is with more threads; `table` has width, threads, samples_per_second."""
    axes = axes or style.figure(6.4, 4.0)[1]
    medians = table.groupby(["width", "threads"])["samples_per_second"].median().unstack()
    counts = [int(count) for count in medians.columns]
    style.theory(axes, counts, counts, "as many times as threads", colour="ideal")
    gains = {}
    for number, width in enumerate(medians.index):
        gain = medians.loc[width] / medians.loc[width].iloc[0]
        gains[int(width)] = float(gain.iloc[-1])
        label = f"layers of {int(width):,} units"
        axes.plot(
            counts, gain, color=style.colour_of(f"worker {number}"), label=label, marker=style.MARKERS[number]
        )
    style.power_axis(axes, counts)
    axes.set(xlabel="threads of the worker", ylabel="times as fast as one thread", ylim=(0, None))
    finding = _threads_finding(gains[min(gains)], gains[max(gains)], counts[-1])
    style.headline(axes, finding, f"one worker, medians; up to {counts[-1]} threads")
    style.label_ends(axes)
    return axes


def _threads_finding(narrow: float, wide: float, threads: int) -> str:
    """What the gains of narrow and wide layers with the most threads say together."""
    if wide < 1.1:
        return f"Here and now, {threads} threads are no faster than one"
    if wide > 1.2 * narrow:
        return "More threads pay where matrices are large"
    return "More threads pay, for small matrices as for large ones"


def racks(rows: Sequence[tuple[str, str, float, float]], detail: str) -> Figure:
    """Seconds of an all-reduce by algorithm and placement: (algorithm, placement, seconds or NaN, in theory)."""
    table = pd.DataFrame(rows, columns=["algorithm", "placement", "seconds", "theory"])
    figure, axes = style.figure(7.2, 3.4)
    algorithms = list(dict.fromkeys(table["algorithm"]))
    placements = list(dict.fromkeys(table["placement"]))
    for row, (algorithm, placement) in enumerate((a, p) for a in algorithms for p in placements):
        (found,) = table[(table["algorithm"] == algorithm) & (table["placement"] == placement)].itertuples()
        height = -row - 0.5 * algorithms.index(algorithm)
        axes.plot(
            [found.theory] * 2, [height - 0.35, height + 0.35], color=style.COLOURS["theory"], linewidth=2
        )
        colour = f"worker {placements.index(placement)}"
        style.measured(
            axes, [found.seconds], [height], colour=colour, marker=style.MARKERS[placements.index(placement)]
        )
        axes.annotate(
            f"{algorithm.replace('_', '-')}, {placement}", (0, height), (-6, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", ha="right", va="center", fontsize=9.5,
        )  # fmt: skip
    axes.set(xlabel="seconds of one all-reduce", xlim=(0, None), yticks=[])
    axes.grid(axis="y", visible=False)
    style.headline(figure, _racks_finding(table), detail)
    return figure


def _racks_finding(table: pd.DataFrame) -> str:
    ratios: Mapping[str, float] = {
        str(algorithm): float(rows["seconds"].iloc[-1] / rows["seconds"].iloc[0])
        for algorithm, rows in table.groupby("algorithm", sort=False)
    }
    known = {name: ratio for name, ratio in ratios.items() if ratio == ratio}
    if not known:
        return "In theory, a second rack makes every all-reduce slower"
    words = ", ".join(f"{name.replace('_', '-')} × {ratio:.1f}" for name, ratio in known.items())
    return f"What a second rack costs: {words}"


DRAWINGS = {
    "11_training_job.svg": training_job,
    "11_classic_mode.svg": classic_mode,
    "11_network.svg": network,
    "11_notebook_instance.svg": notebook_instance,
}
