"""The workshop's driver: starts the processes that `members.json`, beside it, lists for this host.

With `mode: drivers`, ModelTrainer brings it into the container, and the SDK's own entry point calls it. On an emulated
instance it also starts what the toolkit would. It needs the standard library alone.
"""

import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
GOODBYE_SECONDS = 3.0  # for ranks of other hosts to leave a rendezvous on this one
POLL_SECONDS = 0.05


def address_of(host: str) -> str:
    """The address of `host`; instances do not all start in the same second, so its name may not be known yet."""
    deadline = time.monotonic() + float(
        os.environ["WORKSHOP_JOIN_SECONDS"]
    )  # as its ranks wait for each other
    while True:
        try:
            return socket.gethostbyname(host)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)


def first_failure(processes: list[subprocess.Popen[bytes]]) -> int:
    """Wait until all have ended, or one has failed; its exit code, or 0."""
    while True:
        codes = [process.poll() for process in processes]
        if any(codes) or None not in codes:
            return next((code for code in codes if code), 0)
        time.sleep(POLL_SECONDS)


def main() -> int:
    """Start this host's processes and wait for them; the container's exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    host = os.environ["SM_CURRENT_HOST"]
    members = json.loads((HERE / "members.json").read_text())[host]
    interface = os.environ["SM_NETWORK_INTERFACE_NAME"]
    words = {"{python}": sys.executable, "{drivers}": str(HERE), "{interface}": interface}
    shared = {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))}
    if "WORKSHOP_EMULATED" not in os.environ:
        addresses = {name: address_of(name) for name in json.loads(os.environ["SM_HOSTS"])}
        # Where ranks of the workshop's own message passing may join: a VPC's block is a /16 at most.
        shared["WORKSHOP_SUBNET"] = str(ipaddress.ip_network(f"{addresses[host]}/16", strict=False))

    def filled(text: str) -> str:
        for word, value in words.items():
            text = text.replace(word, value)
        return text

    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for member in members:
            variables = {name: filled(value) for name, value in member["environment"].items()}
            command = [filled(word) for word in member["command"]]
            started[member["name"]] = subprocess.Popen(command, env={**os.environ, **shared, **variables})
        code = first_failure([started[member["name"]] for member in members if member["required"]])
        if code:
            reason = f"ExecuteUserScriptError on {host}: exit code {code}"
            (Path(os.environ["SM_OUTPUT_DIR"]) / "failure").write_text(reason)
        elif "rendezvous-0" in started:
            time.sleep(GOODBYE_SECONDS)
    finally:
        for process in started.values():
            process.kill()  # as the end of a container does
    return code if 0 <= code < 256 else 1


if __name__ == "__main__":
    sys.exit(main())
