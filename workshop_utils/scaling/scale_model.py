"""A scale model of a cluster: a laptop on which the ratios that decide about scaling are the cluster's.

    model = ScaleModel.of("p3.2xlarge", "vgg16", "horovod")
    model.predict([1, 2, 4, 8, 16])                     # closed form, at once
    model.measure([1, 2, 4, 8, 16], Store.default())    # real processes, gradients and messages, emulated devices
    ScaleModel.of("p3.2xlarge", "vgg16", "horovod", faster_link=10).predict([16])

Engineers test a small aeroplane in a wind tunnel at the large one's Reynolds number. Here the numbers are, layer by
layer, gradient bytes over link rate and over device time. All bytes shrink by one factor and all times stretch by
another, chosen for each number of workers such that this machine has time to spare; results are scaled back.

What is folded, and left out: a machine with several devices is one worker, whose link is slowed by as much as a ring
through all devices moves more than one through the machines. Latency is in `predict` alone, since kernel links here
have none. Loading data, the optimizer, and what the exchange takes from the devices' own speed are in neither.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
from pydantic import Field, PositiveFloat, PositiveInt

from workshop_utils.comm.topology import Link
from workshop_utils.jobs import Description, JobError, TrainingJob
from workshop_utils.network import Network
from workshop_utils.network.devices import MOST_HOST_SHARE, EmulatedDevice
from workshop_utils.ranks import on_ranks
from workshop_utils.scaling import catalogue
from workshop_utils.scaling.catalogue import BytesPerSecond, Seconds
from workshop_utils.scaling.cost import all_reduce_seconds, synchronous_server_seconds
from workshop_utils.scaling.experiment import (
    Setting,
    Store,
    key_of,
    machine,
    measure_all,
    package,
    progress_bar,
)
from workshop_utils.scaling.layers import Layer, layers
from workshop_utils.scaling.published import published_table
from workshop_utils.setup.machine import cores
from workshop_utils.training.emulated_device import FORWARD

JOB = Path(__file__).with_name("measure_step")
MOST_MACHINES = 64  # that are emulated; more are only predicted
NBYTES, FUSED_TIMES = 240_000, 3  # of the scaled gradient; more where it is sent in pieces, which stay small
MOST_LAYERS = 24  # of the scaled model; neighbours are merged, of the smallest first
STEPS, FEWER_STEPS = 4, 3  # of a measured run, fewer where a step takes seconds; the first is left out
CPU_SECONDS = 0.03  # that a worker's step takes of this machine, about; each run measures it
LEAST_EXCHANGE_SECONDS = (
    0.1  # well above what an idle link lets through at once: `network.wiring.burst_nbytes`
)
LEAST_DEVICE_SECONDS = 0.2
LONGEST_STEP_SECONDS = 60
LEAST_SHARE = 0.002  # of a step: a shorter exchange may be off by any part of it
MOST_TRIES = 3
WIDTH, HEAD = 64, 650  # of the scaled model: its layers' inputs, and the parameters of its last layer
FORWARDED_NBYTES = 32 << 20
UTILISATION = 0.4  # of the peak, where nobody has published the model's throughput on any device

# What is sent at once during the backward pass: DDP's buckets, Horovod's fusion buffer. The others wait for its end.
FUSED_NBYTES = {"torch_ddp": 25 << 20, "horovod": 128 << 20}
FIRST_NBYTES = {"torch_ddp": 1 << 20}  # of its first bucket, which leaves early
TRANSFORMERS = ("bert-base", "gpt-1b")  # whose part of the peak is known by likeness
STRATEGIES = ("ring", "workshop_parameter_server", *FUSED_NBYTES)


class Cluster(Description):
    """Machines of one kind; rates are one way.

    Attributes:
        device: of which each machine has `devices`, as data/throughputs.csv calls it.
        peak: floating-point operations of one device a second.
        link: of a machine to others, such as "25Gbit".
        reached: the part of it that messages get.
        latency: from one machine to another.
        inner: from one device to another of its machine.
    """

    name: str
    source: str = ""
    device: str
    devices: PositiveInt = 1
    peak: PositiveFloat
    link: BytesPerSecond
    reached: float = Field(default=0.9, gt=0, le=1)
    latency: Seconds = 30e-6
    inner: BytesPerSecond

    @classmethod
    def named(cls, name: str) -> Cluster:
        """One of data/clusters.yaml or data/instances.yaml. Raises CatalogueError with the nearest name."""
        of_plans = {each.name: cls._of_instance(each) for each in catalogue.instances().values()}
        return catalogue.pick("cluster", name, {**catalogue.load(cls, "clusters"), **of_plans}, cls)

    @classmethod
    def _of_instance(cls, kind: catalogue.Instance) -> Cluster:
        rates = {
            "link": f"{8 * kind.network_bytes_per_second}bit",
            "inner": f"{8 * kind.inner_bytes_per_second}bit",
        }
        peak = kind.flops_per_second["bfloat16"] * kind.kernel_efficiency / UTILISATION
        about = {
            "name": kind.name,
            "source": f"{kind.source}; the part that messages get is a guess",
            "device": kind.accelerator,
            "devices": kind.accelerators,
        }
        return cls.model_validate({**about, **rates, "peak": peak, "latency": kind.network_latency_seconds})


@dataclass(frozen=True)
class ScaleModel:
    """A model that data parallelism trains on a cluster, and how to emulate it.

    Attributes:
        batch: examples a device.
        step_seconds: of one device by itself, forward and backward.
        measured_by: the source of that.
        faster_link: how many times the cluster's rate the link has.
    """

    cluster: Cluster
    model: str
    strategy: str
    batch: int
    step_seconds: float
    measured_by: str
    faster_link: float = 1.0

    @classmethod
    def of(
        cls,
        cluster: str | Cluster,
        model: str,
        strategy: str = "ring",
        batch: int | None = None,
        faster_link: float = 1.0,
    ) -> Self:
        """By names; `batch` is by default that at which the throughput was published.

        Raises:
            JobError, CatalogueError: for what is unknown or cannot be emulated, with what would be right.
        """
        if strategy not in STRATEGIES:
            close = difflib.get_close_matches(strategy, STRATEGIES, n=1, cutoff=0.4)
            advice = f"; did you mean {close[0]}?" if close else ""
            raise JobError(f"strategy is {strategy!r}; a scale model has {', '.join(STRATEGIES)}{advice}")
        if not 0.001 <= faster_link <= 1e6:
            raise JobError(f"faster_link is {faster_link}; it must be from 0.001 to a million, such as 10")
        if batch is not None and batch < 1:
            raise JobError(f"batch is {batch}; it must be at least 1")
        kind = Cluster.named(cluster) if isinstance(cluster, str) else cluster
        size, seconds, source = _one_device(kind, model, batch)
        return cls(kind, model, strategy, size, seconds, source, faster_link)

    @property
    def table(self) -> list[Layer]:
        """The model's layers as they are emulated: neighbours are merged, those with the fewest parameters first."""
        table = layers(self.model)
        while len(table) > MOST_LAYERS:
            pairs = [first.parameters + second.parameters for first, second in itertools.pairwise(table)]
            at = pairs.index(min(pairs))
            first, second = table[at : at + 2]
            merged = Layer(first.name, first.parameters + second.parameters, first.flops + second.flops)
            table[at : at + 2] = [merged]
        return table

    @property
    def nbytes(self) -> int:
        """Of the gradient, in float32."""
        return 4 * sum(each.parameters for each in layers(self.model))

    def machines(self, devices: int) -> int:
        """How many machines `devices` fill. Raises JobError where they fill some in part."""
        whole = self.cluster.devices
        if devices < 1 or (devices > whole and devices % whole):
            raise JobError(
                f"workers is {devices}; {self.cluster.name} has {whole} in a machine: take a multiple of that"
            )
        return -(-devices // whole)

    def __str__(self) -> str:
        cluster, table = self.cluster, layers(self.model)
        largest = max(table, key=lambda each: each.parameters)
        rate = f"{8e-9 * cluster.link * self.faster_link:g} Gbit/s between machines"
        rate += f", {self.faster_link:g} times theirs," if self.faster_link != 1 else ","
        fused = FUSED_NBYTES.get(self.strategy)
        sends = (
            f"pieces of about {fused / 2**20:g} MiB, or a larger layer, during"
            if fused
            else "all gradients after"
        )
        lines = [
            f"{cluster.name}: {cluster.devices} × {cluster.device} a machine; {rate} "
            f"of which messages get {cluster.reached:.0%} ({cluster.source})",
            f"{self.model}: {len(table)} layers, {self.nbytes / 1e6:,.1f} MB of gradients, "
            f"{4 * largest.parameters / 1e6:,.1f} MB of them in {largest.name}",
            f"one device: {self.batch} examples in {self.step_seconds:.3f} s ({self.measured_by})",
            f"{self.strategy}: sends {sends} the backward pass",
        ]
        if cluster.devices > 1:
            together = (
                "sum their gradients first" if self._has_server else "are links of one ring with all others"
            )
            lines.append(
                f"folded: the {cluster.devices} devices of a machine are one worker; they {together}"
            )
        return "\n".join(lines)

    def predict(self, workers: Sequence[int]) -> pd.DataFrame:
        """Closed forms alone: a row for each of `workers`, which counts devices.

        Columns: cluster, model, strategy, workers, machines, gradient_nbytes; the seconds of one device by itself, and
        of a step; throughput, in examples a second; efficiency, of weak scaling, over one device without any exchange.

        Raises:
            JobError: if some of `workers` fill machines in part.
        """
        return self._table([(count, self._seconds(count)) for count in workers])

    def _table(self, steps: Sequence[tuple[int, float]]) -> pd.DataFrame:
        counts, seconds = (np.array(column) for column in zip(*steps, strict=True))
        return pd.DataFrame(
            {
                "cluster": self.cluster.name,
                "model": self.model,
                "strategy": self.strategy,
                "workers": counts,
                "machines": [self.machines(count) for count in counts],
                "gradient_nbytes": self.nbytes,
                "device_seconds": self.step_seconds,
                "step_seconds": seconds,
                "throughput": counts * self.batch / seconds,
                "efficiency": self.step_seconds / seconds,
            }
        )

    def _seconds(self, devices: int) -> float:
        across = Link(self.cluster.latency, self.link_of(devices))
        return self.exchanged(self.alone(devices), self.machines(devices), across)

    @property
    def _has_server(self) -> bool:
        """Whether gradients go to a server, so even those of a single worker over a link."""
        return self.strategy == "workshop_parameter_server"

    def alone(self, devices: int) -> float:
        """Seconds of a folded machine's step, without what it exchanges with others.

        One machine is a ring of its devices. Among several, the ring passes through all devices and goes as fast as its
        slowest link, so that the others cost nothing more; what devices push to a server is summed inside before.
        """
        if self.machines(devices) > 1 and not self._has_server:
            return self.step_seconds
        inside = Link(0.0, self.cluster.inner)
        return self.exchanged(self.step_seconds, min(devices, self.cluster.devices), inside, by_ring=True)

    def link_of(self, devices: int) -> float:
        """Bytes of gradients per second of a folded machine, through whose link a ring passes along all devices."""
        machines = self.machines(devices)
        rate = self.cluster.link * self.cluster.reached * self.faster_link
        if machines == 1 or self._has_server:
            return rate
        slower = min(rate, self.cluster.inner if self.cluster.devices > 1 else rate)  # of the ring's links
        return slower * (machines - 1) / machines * devices / (devices - 1)

    def sharded_servers_seconds(self, devices: int) -> float:
        """Seconds of a step with a server on every machine, each with an equal part of the parameters.

        A machine sums its devices' gradients; then it sends what a ring of machines sends: 2 (m − 1)/m · K. Only for
        a model whose strategy is one server.
        """
        across = Link(self.cluster.latency, self.link_of(devices))
        exchange = float(all_reduce_seconds("ring", self.machines(devices), self.nbytes, across))
        return self.alone(devices) + exchange

    def exchanged(
        self,
        step: float,
        workers: int,
        link: Link,
        nbytes: float | None = None,
        by_ring: bool = False,
        table: Sequence[Layer] = (),
    ) -> float:
        """Seconds of a step that takes `step` by itself, with the exchange between `workers`.

        The backward pass gives gradients from the last layer to the first. DDP sends a bucket as soon as it is full,
        Horovod what has become ready while it sent; one all-reduce follows the other. The layers' `table` and the
        gradient's `nbytes` are by default the model's own.
        """
        to_server = self._has_server and not by_ring
        if workers == 1 and not to_server:
            return step
        table = (table or layers(self.model))[::-1]
        shrunk = 1.0 if nbytes is None else nbytes / self.nbytes
        sizes = np.array([4 * shrunk * each.parameters for each in table])
        if self.strategy not in FUSED_NBYTES:
            if to_server:
                return step + float(synchronous_server_seconds(workers, sizes.sum(), link))
            return step + float(all_reduce_seconds("ring", workers, sizes.sum(), link))
        costs = np.cumsum([each.flops for each in table])
        ready = step * (FORWARD + (1 - FORWARD) * costs / costs[-1])
        at, free = 0, 0.0
        while at < len(sizes):
            until, whole = at + 1, FUSED_NBYTES[self.strategy]
            limit = shrunk * (whole if at else FIRST_NBYTES.get(self.strategy, whole))
            if self.strategy == "torch_ddp":  # which closes a bucket once it has reached its size
                while until < len(sizes) and sizes[at:until].sum() < limit:
                    until += 1
            else:
                while (
                    until < len(sizes)
                    and ready[until] <= max(free, ready[at])
                    and sizes[at : until + 1].sum() <= limit
                ):
                    until += 1
            free = max(free, ready[until - 1]) + float(
                all_reduce_seconds("ring", workers, sizes[at:until].sum(), link)
            )
            at = until
        return max(step, free)

    def emulation(self, workers: int, forwarded: float, slower: float = 1.0) -> Emulation:
        """How this machine, which can forward `forwarded` bytes a second in total, emulates `workers` devices.

        Time is stretched until these hold: a device's step is long beside what a sleep is late by; an exchange
        is long beside what an idle link lets through at once; the workers' own work is a tenth of the cores' time at
        most; and all links together carry at most half of what this machine forwards. `slower` stretches it further.

        Raises:
            JobError: if there are more machines than can be emulated.
        """
        machines = self.machines(workers)
        if machines > MOST_MACHINES:
            raise JobError(
                f"workers is {workers}, on {machines} machines; {MOST_MACHINES} are the most that are emulated here: "
                "leave the larger ones to --predict"
            )
        step = self.alone(workers)
        larger = FUSED_TIMES if self.strategy in FUSED_NBYTES else 1
        link, shrunk = self.link_of(workers), larger * NBYTES / self.nbytes
        elements = [max(1, round(shrunk * each.parameters / WIDTH)) * WIDTH for each in self.table]
        nbytes = 4 * (sum(elements) + HEAD)
        whole = self.exchanged(step, machines, Link(0.0, link))
        apart = replace(self, strategy="ring" if self.strategy in FUSED_NBYTES else self.strategy)
        exchange = apart.exchanged(step, machines, Link(0.0, link)) - step
        rate = link * nbytes / self.nbytes  # were time not stretched
        stretch = slower * max(
            LEAST_DEVICE_SECONDS / step,
            LEAST_EXCHANGE_SECONDS / exchange if exchange > LEAST_SHARE * step else 0.0,
            machines * larger * CPU_SECONDS / (MOST_HOST_SHARE * cores() * whole),
            machines * rate / (forwarded / 2),
        )
        if stretch * whole > LONGEST_STEP_SECONDS:
            raise JobError(
                f"a step of {workers} workers would take {stretch * whole:,.0f} s here; the limit is "
                f"{LONGEST_STEP_SECONDS} s: take fewer, or leave it to --predict"
            )
        return Emulation(self, workers, machines, step, stretch, rate / stretch, tuple(elements), nbytes)

    def measure(self, workers: Sequence[int], store: Store) -> pd.DataFrame:
        """Real processes, gradients and messages on emulated devices and links; what `store` has is not run again.

        Returns:
            The columns of `predict`, in the cluster's seconds; the efficiency that was `predicted`; what was
            `emulated`; how many times (`stretch`) as long a step took; and `host_share`, the part of this machine's
            cores that the workers kept busy.

        Raises:
            JobError: if this machine cannot emulate it, or a run fails.
        """
        for count in workers:  # a mistake in the last is told before the first is run
            self.emulation(count, math.inf)
        forwarded = forwarded_bytes_per_second(store)
        steps, notes = [], []
        for count in progress_bar(workers, f"emulating {self.model}, {self.strategy}"):
            slower = 1.0
            for _ in range(MOST_TRIES):
                emulation = self.emulation(count, forwarded, slower)
                run = measure_all([emulation.setting()], store, progress=False).iloc[0]
                if run["state"] != "succeeded":
                    raise JobError(f"{count} workers could not be measured: {run['reason']}")
                if not run["remark"]:
                    break
                share = run["host_share"]
                slower *= 1.2 * share / MOST_HOST_SHARE if share > MOST_HOST_SHARE else 2.0
            else:
                raise JobError(
                    f"{count} workers could not be measured, however slow their devices: {run['remark']}"
                )
            steps.append((count, run["step_seconds"] / emulation.stretch))
            notes.append((str(emulation), emulation.stretch, run["host_share"]))
        predicted = self.predict(workers)["efficiency"].rename("predicted")
        emulated = pd.DataFrame(notes, columns=["emulated", "stretch", "host_share"])
        return self._table(steps).join(predicted).join(emulated)


def _one_device(cluster: Cluster, model: str, batch: int | None) -> tuple[int, float, str]:
    """Examples and seconds of one device's step, and where they are from.

    What was published for this device; or for another one, over the ratio of their peaks; or a part of the peak.
    """
    table = layers(model)
    published: Any = published_table("throughputs").query("model == @model").to_dict("records")
    clusters = catalogue.load(Cluster, "clusters").values()
    peaks = {each.device: each.peak for each in clusters}  # in float32, as the throughputs
    own = [row for row in published if row["device"] == cluster.device]
    if published and (own or cluster.device in peaks):
        row = (own or published[::-1])[0]
        size = batch or int(row["batch"])
        seconds, source = size / row["examples_per_second"], row["source"]
        if size != row["batch"]:
            source += f", scaled from a batch of {row['batch']}"
        if not own:
            seconds *= peaks[row["device"]] / cluster.peak
            source = f"estimated from one {row['device']}: {source}"
        return size, seconds, source
    if model not in TRANSFORMERS:
        raise JobError(
            f"model is {model!r}; how fast one {cluster.device} trains it is not known here: take "
            f"{' or '.join(TRANSFORMERS)}, or one of {', '.join(each.name for each in clusters)}"
        )
    size = batch or 32
    flops = 3 * size * sum(each.flops for each in table)
    return size, flops / (UTILISATION * cluster.peak), "estimated from the device's peak"


def headline(store: Store, workers: Sequence[int]) -> pd.DataFrame:
    """What every report begins with: a model that computes much and one that sends much, by ring and by servers.

    Rows of `measure`, for a ring and for one server, on machines of four devices; in further rows, all those of
    `sharded_servers` among them, nothing but `predicted` is known.
    """
    measured, lines = [], []
    for name, strategy in itertools.product(("resnet101", "vgg16"), ("ring", "workshop_parameter_server")):
        model = ScaleModel.of("p100x4-25g", name, strategy)
        full = model.cluster.devices
        counts = [*range(1, full), *range(full, max(workers) + 1, full)]
        measured.append(model.measure(workers, store))
        lines.append(model.predict(counts))
        if model._has_server:
            sharded = [(count, model.sharded_servers_seconds(count)) for count in counts]
            lines.append(model._table(sharded).assign(strategy="sharded_servers"))
    of_row, predicted = (
        ["cluster", "model", "strategy", "workers"],
        ["gradient_nbytes", "device_seconds", "predicted"],
    )
    drawn = pd.concat(lines).rename(columns={"efficiency": "predicted"})[of_row + predicted]
    return drawn.merge(pd.concat(measured).drop(columns=predicted), how="left", on=of_row)


@dataclass(frozen=True)
class Emulation:
    """What this machine does in place of a cluster's step: one process a machine, and everything to scale.

    Attributes:
        step_seconds: the cluster's, of a machine by itself.
        stretch: emulated seconds for one of the cluster's.
        bytes_per_second: of payload, on each link.
        elements: parameters of each layer.
        nbytes: of the gradient.
    """

    model: ScaleModel
    workers: int
    machines: int
    step_seconds: float
    stretch: float
    bytes_per_second: float
    elements: tuple[int, ...]
    nbytes: int

    @property
    def _bits_per_second(self) -> float:
        """Of a link that carries `bytes_per_second` of payload."""
        return 8 * self.bytes_per_second / Network(bandwidth="1Mbit").payload_share

    def __str__(self) -> str:
        device, rate = 1000 * self.stretch * self.step_seconds, 1e-6 * self._bits_per_second
        shape = f"{self.machines} × {device:.0f} ms, {rate:.3g} Mbit/s, {self.nbytes / 1e3:.0f} kB"
        fused = FUSED_NBYTES.get(self.model.strategy)
        return shape + (
            f" in pieces of {fused * self.nbytes / self.model.nbytes / 1e3:.0f} kB" if fused else ""
        )

    @property
    def expected_seconds(self) -> float:
        """The emulated step by the closed form, for comparison."""
        link = Link(0.0, self.bytes_per_second)
        step, table = self.stretch * self.step_seconds, self.model.table
        return self.model.exchanged(step, self.machines, link, table=table, nbytes=self.nbytes)

    def setting(self) -> Setting:
        """The run to measure."""
        strategy, shrunk = self.model.strategy, self.nbytes / self.model.nbytes
        arguments = {
            "elements": ",".join(map(str, self.elements)),
            "costs": ",".join(f"{each.flops:g}" for each in self.model.table),
            "batch-size": 8,
            "steps": STEPS if self.expected_seconds < 1.5 else FEWER_STEPS,
        }
        environment = {}
        if strategy == "torch_ddp":
            first, others = (round(shrunk * each[strategy]) for each in (FIRST_NBYTES, FUSED_NBYTES))
            arguments["bucket-bytes"] = f"{first + 4 * HEAD},{others}"
        if strategy == "horovod":
            # The cluster's would be 1 ms, stretched; so many negotiations would keep the cores busy.
            cycle = max(0.001 * self.stretch, self.expected_seconds / 40)
            environment = {"HOROVOD_FUSION_THRESHOLD": f"{round(shrunk * FUSED_NBYTES[strategy])}"}
            environment["HOROVOD_CYCLE_TIME"] = f"{1000 * cycle:.1f}"  # milliseconds
        job = TrainingJob.load(JOB).replace(
            strategy=strategy,
            workers=self.machines,
            arguments=arguments,
            environment=environment,
            timeout=f"{round(60 + 2 * STEPS * self.expected_seconds)}s",
        )
        return Setting(
            job,
            Network(bandwidth=f"{round(self._bits_per_second)}bit"),
            device=EmulatedDevice(seconds=f"{1000 * self.stretch * self.step_seconds:.3f}ms"),
        )


def forwarded_bytes_per_second(store: Store) -> float:
    """What this machine forwards between network namespaces, of all links together; measured once."""
    key = key_of({"forwarded": FORWARDED_NBYTES, "machine": machine(), "package": package()})
    if (known := store.get(key)) is None:

        def send_round(communicator: Any) -> float:
            import time

            array = np.zeros(FORWARDED_NBYTES, np.uint8)
            communicator.barrier()
            started = time.perf_counter()
            communicator.send_recv(1 - communicator.rank, array, 1 - communicator.rank, np.empty_like(array))
            return time.perf_counter() - started

        seconds = max(on_ranks(2, send_round, network="20Gbit").values)
        known = store.put(key, pd.DataFrame({"bytes_per_second": [2 * FORWARDED_NBYTES / seconds]}))
    return float(known["bytes_per_second"].iloc[0])
