"""Drives an elastic Horovod job: starts its workers, and goes on with the others when one dies or another comes.

This is what `horovodrun` does with a host discovery script: Horovod's own driver decides who has which rank. Here
every worker counts as a host of its own; a host whose worker has died is left out for some seconds, and then gets a
new one. Two more things differ: all listen on loopback alone, where Horovod's servers take every interface, and
the driver unpickles nothing that comes through a socket. (Each worker's notification service is Horovod's own: it
takes what is signed with a secret that the worker has made.)

    python -I horovod_elastic.py drive HOST PORT INTERFACE WORKERS SCRIPT ARGUMENT...

starts each worker as `python horovod_elastic.py work SCRIPT ARGUMENT...` and prints each of its lines with a tag:
`[worker-1]<stderr>: text`. It needs Horovod and the standard library; it is a process of the run as mpirun is.

Source: Horovod 0.28.1, horovod/runner/elastic/ and horovod/runner/gloo_run.py, `launch_gloo_elastic`.
"""

from __future__ import annotations

import base64
import io
import logging
import os
import pickle
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from horovod.runner.common.util import network
from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.elastic.discovery import FixedHosts, HostManager
from horovod.runner.elastic.driver import ElasticDriver
from horovod.runner.elastic.rendezvous import PUT_WORKER_ADDRESSES, create_rendezvous_handler
from horovod.runner.elastic.worker import HostsUpdatedRequest, HostUpdateResult
from horovod.runner.gloo_run import create_slot_env_vars
from horovod.runner.http import http_server

FEWEST_WORKERS = 1
COOLDOWN_SECONDS = (1, 60)  # a host is left out for 2 to 3 s at first, then for ever longer
MOST_RESETS = 100  # a worker that dies again and again must not keep a job for ever
GRACE_SECONDS = 2.0  # between SIGTERM and SIGKILL
PATIENCE_SECONDS = 10.0  # for a worker to answer that it has heard of a change


class PlainUnpickler(pickle.Unpickler):
    """Reads containers, texts and numbers; whatever names a class or a function is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} has no place in an address")


def handler_for(driver: ElasticDriver) -> type:
    """Horovod's handler of requests, but for the way in which a worker's own address is read."""
    base: Any = create_rendezvous_handler(driver)

    class Handler(base):  # Horovod makes a class for each driver
        def _put_value(self, scope: str, key: str, value: bytes) -> None:
            if scope == PUT_WORKER_ADDRESSES:
                addresses, secret = PlainUnpickler(io.BytesIO(base64.b64decode(value))).load()
                host, local_rank = key.split(":")
                self._put_worker_addresses(host, int(local_rank), addresses, secret)
            else:
                super()._put_value(scope, key, value)

    return Handler


class Notifier:
    """Tells a worker, which is rank 0, that hosts have come or gone."""

    def __init__(self, addresses: dict[str, list[tuple[str, int]]], secret: bytes) -> None:
        self._address = next(iter(addresses.values()))[0]
        self._wire = network.Wire(secret)

    def notify_hosts_updated(self, timestamp: int, update_res: HostUpdateResult) -> None:
        """Send word, and wait for the answer, whatever it is."""
        with socket.create_connection(self._address, timeout=PATIENCE_SECONDS) as link:
            with link.makefile("wb") as outgoing:
                self._wire.write(HostsUpdatedRequest(timestamp, update_res), outgoing)
            while link.recv(1 << 12):
                continue


class Driver(ElasticDriver):
    """Horovod's driver, which reaches its workers through Notifier."""

    def register_worker_server(
        self, host: str, slot: int, addresses: dict[str, list[tuple[str, int]]], secret_key: bytes
    ) -> None:
        self._worker_clients[host, slot] = Notifier(addresses, secret_key)


def in_order(available_hosts: set[str], previous: Sequence[str]) -> list[str]:
    """The hosts as ranks are given to them: those that were there before first, the others by their names.

    In place of Horovod's own, which takes new hosts as they come out of a set.
    """
    return sorted(
        available_hosts, key=lambda host: (previous.index(host) if host in previous else len(previous), host)
    )


class Workers:
    """Starts the processes of the job, and passes on what they print."""

    def __init__(self, command: Sequence[str], variables: dict[str, str]) -> None:
        self._command, self._variables = tuple(command), variables
        self._printing = threading.Lock()
        self.last_failure = ""

    def run(self, slot: SlotInfo, ending: Sequence[threading.Event]) -> tuple[int, float]:
        """Run one worker until it ends or an event of `ending` is set; its exit code, and when that was."""
        name = slot.hostname
        index = name.rpartition("-")[2]
        extra = {"WORKSHOP_INDEX": index}
        # To Horovod each worker is alone on a host, and all would take the first GPU of those that they see.
        if gpus := os.environ.get("CUDA_VISIBLE_DEVICES"):
            extra["CUDA_VISIBLE_DEVICES"] = ",".join(gpus.split(",")[int(index) :][:1])
        process = subprocess.Popen(
            self._command,
            env={**os.environ, **self._variables, **create_slot_env_vars(slot), **extra},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        assert process.stderr is not None
        threads = [
            threading.Thread(target=self._pass_on, args=(pipe, f"[{name}]<{stream}>: "), daemon=True)
            for pipe, stream in ((process.stdout, "stdout"), (process.stderr, "stderr"))
        ]
        for thread in threads:
            thread.start()
        was_ended = _wait(process, ending)
        for thread in threads:
            thread.join(GRACE_SECONDS)  # what the worker has left running may hold its pipes
        code = process.returncode
        if code and not was_ended:  # worded as mpirun words it; launchers parse it
            how = f"exited on signal {-code}" if code < 0 else f"ended with exit code {code}"
            self.last_failure = f"process rank {index} {how}"
        return code, time.time()

    def _pass_on(self, pipe: IO[str], tag: str) -> None:
        for line in pipe:
            with self._printing:
                print(tag, line.rstrip("\n"), sep="", flush=True)


def _wait(process: subprocess.Popen[str], ending: Sequence[threading.Event]) -> bool:
    """Wait for the end of `process`, and bring it about once an event of `ending` is set; whether that was so."""
    while process.poll() is None:
        if any(event.is_set() for event in ending):
            process.terminate()
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return True
        time.sleep(0.05)
    return False


def drive(host: str, port: int, interface: str, count: int, script: Sequence[str]) -> int:
    """Run the job with `count` workers, or with as many of them as live; the exit code."""
    logging.getLogger().setLevel(logging.CRITICAL)  # what matters is printed below
    HostManager.order_available_hosts = staticmethod(in_order)
    # In place of Horovod's `find_port`, which binds to every interface.
    http_server.find_port = lambda make_server: (make_server((host, port)), port)
    rendezvous = http_server.RendezvousServer()
    driver = Driver(
        rendezvous,
        FixedHosts({f"worker-{index}": 1 for index in range(count)}),
        min_num_proc=FEWEST_WORKERS,
        max_num_proc=count,
        reset_limit=MOST_RESETS,
        cooldown_range=COOLDOWN_SECONDS,
    )
    rendezvous.start(handler_for(driver))
    driver.wait_for_available_slots(count)
    variables = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": host,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": interface,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_ELASTIC": "1",
    }
    workers = Workers([sys.executable, "-P", __file__, "work", *script], variables)
    driver.start(count, workers.run)
    results = driver.get_results()
    driver.stop()
    failed = any(code for code, _ in results.worker_results.values())
    if results.error_message or failed:
        print(results.error_message or "no worker is left", file=sys.stderr)
        print(workers.last_failure, file=sys.stderr)
        return 1
    return 0


def on_loopback(make_server: Callable[[tuple[str, int]], Any]) -> tuple[Any, int]:
    """A server that `make_server` makes, on a free port of loopback, and the port.

    In place of Horovod's `find_port`, which binds to every interface. A server that is made must know its port
    beforehand, so taken ones are passed over.

    Raises:
        OSError: if none of a hundred ports is free.
    """
    for port in random.sample(range(10_000, 32_000), 100):
        try:
            return make_server(("127.0.0.1", port)), port
        except OSError:
            continue
    raise OSError("none of a hundred ports on 127.0.0.1 is free")


def work(script: str, *arguments: str) -> None:
    """Be a worker: run the script as Python would, with its notification service on loopback."""
    network.find_port = on_loopback
    sys.path.insert(0, str(Path(__file__).parent))
    from job_script import run  # type: ignore[import-not-found]  # beside this program

    del sys.path[0]
    run(script, *arguments)


if __name__ == "__main__":
    if sys.argv[1] == "work":
        work(*sys.argv[2:])
    else:
        host, port, interface, count, *script = sys.argv[2:]
        sys.exit(drive(host, int(port), interface, int(count), script))
