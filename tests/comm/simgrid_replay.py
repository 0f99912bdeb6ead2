"""Replays what ranks send and receive in SimGrid, and prints the virtual seconds that it takes.

Run by test_simulated.py with the system's Python, which has Debian's python3-simgrid. On standard input comes
{"latency_seconds", "bandwidth_bytes_per_second", "ranks": [[[to, bytes, source], ...], ...]}, None for no peer.
"""

from __future__ import annotations

import json
import sys

from simgrid import Actor, Engine, LinkInRoute, Mailbox, NetZone  # type: ignore[import-not-found]


def rank_main(rank: int, turns: list[list[int | None]]) -> None:
    """Take this rank's turns: send and receive at once, then the next."""
    for to, nbytes, source in turns:
        sending = None if to is None else Mailbox.by_name(f"{rank} to {to}").put_async("message", nbytes)
        if source is not None:
            receiving, _buffer = Mailbox.by_name(
                f"{source} to {rank}"
            ).get_async()  # it must outlive the wait
            receiving.wait()
        if sending is not None:
            sending.wait()


def main() -> None:
    """One link up and one down for each rank, in a star."""
    given = json.load(sys.stdin)
    engine = Engine(["replay", "--cfg=network/model:CM02", "--cfg=network/crosstraffic:0"])
    zone = NetZone.create_star_zone("star")
    for rank, turns in enumerate(given["ranks"]):
        host = zone.create_host(f"rank {rank}", 1e9)
        bandwidth = given["bandwidth_bytes_per_second"]
        up, down = (zone.create_link(f"{way} {rank}", bandwidth) for way in ("up", "down"))
        up.set_latency(given["latency_seconds"])
        down.set_latency(0)
        up.seal()
        down.seal()
        zone.add_route(host.netpoint, None, None, None, [LinkInRoute(up)], False)
        zone.add_route(None, host.netpoint, None, None, [LinkInRoute(down)], False)
        Actor.create(f"rank {rank}", host, rank_main, rank, turns)
    zone.seal()
    engine.run()
    print(repr(Engine.clock))


main()
