"""How long NCCL's all-reduce takes, from hardware facts alone: nothing measured goes in.

    MACHINES["p5.48xlarge"].seconds(2, 100e6)   # two machines, 100 MB

Latency and bandwidth are those with which NCCL itself chooses its algorithm and protocol. Between them a message is cut
into pieces that follow each other through p links. With s pieces that takes (p + s − 1)(α/p + n/sB), which with many
links and the best s is (√α + √(n/B))²: α for small arrays, n/B for large ones, and up to four times as much as the
larger of both between. NCCL need not cut best, so this is no bound.

Sources: NCCL 2.2x, src/graph/tuning.cc (latencies, shares) and src/graph/topo.h (NVLink); the plugin of AWS for EFA,
aws-ofi-nccl, src/platform-aws.c (latency of EFA, protocols); van de Geijn and Watts (1997) for cutting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from workshop_utils.comm.topology import Numbers

FACTS = yaml.safe_load((Path(__file__).parent / "data" / "nccl.yaml").read_text(encoding="utf-8"))
TREE_SHARE = 0.92  # of a link's bandwidth that a tree reaches
SWITCH_SHARE = 5 / 6  # that NVLink SHARP reaches, where the switch adds


@dataclass(frozen=True)
class GpuMachine:
    """A machine with GPUs, and its network.

    Attributes:
        nvlink_bytes_per_second: of one GPU, one way.
        nvlink_share: the part of it that NCCL counts on: 20 of 25 GB/s a link, 20.6 on Hopper.
        switch_adds: whether its NVSwitch reduces (NVLink SHARP).
        nic_bytes_per_second: of the whole machine, one way.
        nic_latency_seconds: one way.
        protocols: that NCCL may choose there.
        gpus: how many.
    """

    nvlink_bytes_per_second: float
    nvlink_share: float = 0.8
    switch_adds: bool = False
    nic_bytes_per_second: float = math.inf
    nic_latency_seconds: float = 0.0
    protocols: Sequence[str] = ("LL128", "Simple")
    gpus: int = 8

    def latency_seconds(self, machines: int) -> float:
        """α of an all-reduce: the least of the algorithms and protocols that there are.

        A ring has 2 (N − 1) steps, of which 2 (m − 1) are between machines; a tree goes up and down a chain of g GPUs
        and log₂ m machines.
        """
        ring_across, tree_across = 2 * (machines - 1), 2 * math.log2(machines)
        inside = {"ring": 2 * (machines * self.gpus - 1) - ring_across, "tree": 2 * (self.gpus - 1)}
        across = {"ring": ring_across, "tree": tree_across}
        latencies = []
        for each in FACTS["latencies"]:
            if each["protocol"] in self.protocols:
                steps_inside, steps_across = inside[each["algorithm"]], across[each["algorithm"]]
                network = each["across"] + self.nic_latency_seconds
                latencies.append(each["start"] + steps_inside * each["inside"] + steps_across * network)
        return float(min(latencies))

    def bandwidth(self, machines: int) -> float:
        """B of an all-reduce in bytes of the array per second: of the best algorithm inside, or of the NICs if less.

        Inside one machine a ring sends 2 (g − 1)/g of the array; with several machines a chain sends it up and down, if
        the switch does not add. Between m machines each NIC sends 2 (m − 1)/m of it.
        """
        nvlink = self.nvlink_share * self.nvlink_bytes_per_second
        if self.switch_adds:
            inside = SWITCH_SHARE * nvlink
        elif machines == 1:
            inside = nvlink * self.gpus / (2 * (self.gpus - 1))
        else:
            inside = TREE_SHARE * nvlink / 2
        if machines == 1:
            return inside
        return min(inside, TREE_SHARE * self.nic_bytes_per_second * machines / (2 * (machines - 1)))

    def seconds(self, machines: int, nbytes: Numbers) -> Numbers:
        """(√α + √(n/B))² to all-reduce `nbytes` among all GPUs of `machines`."""
        bytes_seconds = nbytes / self.bandwidth(machines)
        return (math.sqrt(self.latency_seconds(machines)) + np.sqrt(bytes_seconds)) ** 2


# By the names of the published curves.
MACHINES = {name: GpuMachine(**facts) for name, facts in FACTS["machines"].items()}
