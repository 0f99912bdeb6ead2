"""What a cluster costs an hour, part by part.

Dollars, on demand, in us-east-1 and us-west-2, as they were known in 2025: written down without access to AWS's price
pages, and not checked against them since. Those of accelerators are the catalogue's, which has a date of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from workshop_utils.eks.cluster import FOLDER, ROOT, Cluster
from workshop_utils.scaling import catalogue

AS_OF = "2025"
NODES = {"m5.large": 0.096, "m5.xlarge": 0.192, "m5.2xlarge": 0.384, "c5.xlarge": 0.17, "g5.8xlarge": 2.448}
CONTROL_PLANE, NAT_GATEWAY = 0.10, 0.045  # an hour; the gateway's traffic costs as much again for each GB
DISK = 0.08  # a GB and month of gp3
DISK_GB = 80  # of a node, where nothing else is said
LUSTRE = {"50": 0.14, "100": 0.19, "200": 0.29}  # a GB and month of PERSISTENT_1, by MB/s for each TiB
HOURS_A_MONTH = 730


def prices(cluster: Cluster) -> Iterator[tuple[str, float | None]]:
    """What is paid for, and how much an hour: None where the price is not known."""
    yield "control plane", CONTROL_PLANE
    yield "NAT gateway, without traffic", NAT_GATEWAY
    for group in cluster.groups:
        count, kind = group["desiredCapacity"], group["instanceType"]
        one = NODES.get(kind)
        if one is None and kind in (listed := catalogue.instances()):
            one = listed[kind].dollars_an_hour
        yield f"{count} × {kind} ({group['name']})", None if one is None else count * one
        size = group.get("volumeSize", DISK_GB)
        yield f"{count} × {size} GB of disk ({group['name']})", count * size * DISK / HOURS_A_MONTH
    kind = yaml.safe_load((ROOT / FOLDER / "storage" / "storage-class.yaml").read_text())["parameters"]
    claim = yaml.safe_load((ROOT / FOLDER / "storage" / "claim.yaml").read_text())["spec"]
    size = int(claim["resources"]["requests"]["storage"].removesuffix("Gi"))
    one = LUSTRE.get(kind["perUnitStorageThroughput"])
    yield f"{size} GB of FSx for Lustre", None if one is None else size * one / HOURS_A_MONTH


def bill(cluster: Cluster) -> str:
    """The prices as a table, and what they are worth."""
    listed = list(prices(cluster))
    lines = [f"  {'not known' if price is None else f'{price:9.3f}'}  {what}" for what, price in listed]
    total = sum(price or 0 for _, price in listed)
    least = "at least " if any(price is None for _, price in listed) else ""
    return "\n".join([
        f"{cluster.name} in {cluster.region}, dollars an hour while it is there:",
        *lines,
        f"  {total:9.3f}  {least}in all, {least}{24 * total:.0f} a day",
        f"Prices as known in {AS_OF} (of accelerators: {catalogue.AS_OF}), and not checked since.",
        "See https://aws.amazon.com/eks/pricing/ and the pages that it leads to; AWS's invoice is what counts.",
    ])  # fmt: skip
