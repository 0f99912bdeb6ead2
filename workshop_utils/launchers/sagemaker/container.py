"""The entry point of a training container: reads what SageMaker has laid out, and starts this host's processes.

It has two lives. On SageMaker, with `mode="drivers"`, it is the container's entry point, and starts the members that
`members.json` beside it lists for this host. Locally it plays the toolkit on one of N stand-in instances, for every
strategy of the classic mode. Either way the script finds what `contract` says. Standard library alone.
"""

import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # contract.py stands beside this file wherever it is

import contract  # type: ignore[import-not-found]  # this is a program; its folder is on the path

HERE = Path(__file__).parent
LAST_LINES = 20  # of standard error, in the reason for a failure
NAMES_SECONDS = 900.0  # as long as the toolkit waits for its hosts
LINGER_SECONDS = 3.0
LEAVE_SECONDS = 3.0  # for servers to see that their chief has gone


class Host:
    """One instance: its folders, its configuration, and the processes that it has started."""

    def __init__(self, root: Path) -> None:
        self.root = root
        config = root / "input" / "config"
        self.resources = json.loads((config / "resourceconfig.json").read_text())
        self.inputs = json.loads((config / "inputdataconfig.json").read_text())
        self.hyperparameters = json.loads((config / "hyperparameters.json").read_text())
        stand_in = root / "stand_in.json"  # only where this is not SageMaker
        self.stand_in: dict[str, Any] = json.loads(stand_in.read_text()) if stand_in.is_file() else {}
        self.hosts: list[str] = self.resources["hosts"]
        self.name: str = self.resources["current_host"]
        own, self.toolkit = contract.split(self.hyperparameters)
        self.script = [sys.executable, str(self.toolkit["sagemaker_program"]), *contract.arguments(own)]
        self.code = root / "code"
        self.environment = {
            **os.environ,
            **contract.environment(
                str(root),
                self.resources,
                self.inputs,
                self.hyperparameters,
                os.environ.get("TRAINING_JOB_NAME", ""),
                str(self.code),
            ),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(self.code), os.environ.get("PYTHONPATH", "")])),
        }
        self.errors: deque[str] = deque(maxlen=LAST_LINES)
        self.started: list[subprocess.Popen[bytes]] = []

    def lay_out(self) -> None:
        """Make the folders that a script may expect, and unpack its source."""
        for folder in ("model", "output/data", "output/intermediate", "input/data", "code"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        if "model" in self.stand_in:  # what is written there outlives the run
            (self.root / "model").rmdir()
            (self.root / "model").symlink_to(self.stand_in["model"], target_is_directory=True)
        for name, path in self.stand_in.get("channels", {}).items():
            (self.root / "input" / "data" / name).symlink_to(path, target_is_directory=True)
        source = self.stand_in.get("source")
        if source and Path(source).is_dir():
            shutil.copytree(source, self.code, dirs_exist_ok=True)
            return
        brought = self.root / "input" / "data" / "code"
        archive = Path(source) if source else brought / "sourcedir.tar.gz"
        if not archive.is_file():  # the Python SDK brings the source as it is
            shutil.copytree(brought, self.code, dirs_exist_ok=True)
            return
        with tarfile.open(archive) as packed:
            packed.extractall(self.code, filter="data")

    def wait_for_names(self) -> None:
        """Return once the names of all hosts are known here; instances do not all start in the same second."""
        deadline = time.monotonic() + NAMES_SECONDS
        for name in self.hosts:
            while not _is_known(name):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the host {name} is not known here after {NAMES_SECONDS:.0f} s")
                time.sleep(1)

    def subnet(self) -> dict[str, str]:
        """The variable by which ranks of the workshop's own message passing may meet across instances."""
        if self.stand_in:
            return {}
        own = socket.gethostbyname(self.name)
        # A VPC's block is a /16 at most, and its private addresses are all that an instance can be called by.
        return {"WORKSHOP_SUBNET": str(ipaddress.ip_network(f"{own}/16", strict=False))}

    def start(self, command: list[str], **variables: str) -> subprocess.Popen[bytes]:
        """Start a process of this host with the contract's variables and `variables`."""
        process = subprocess.Popen(
            [self.local(word) for word in command],
            cwd=self.code,
            env={**self.environment, **self._local_variables(variables)},
            stderr=subprocess.PIPE,
        )
        threading.Thread(target=self._pass_on, args=(process,), daemon=True).start()
        self.started.append(process)
        return process

    def local(self, text: str) -> str:
        """`text` with each host:port replaced by the loopback port that stands for it, where there is one."""
        for address, here in self.stand_in.get("addresses", {}).items():
            text = text.replace(address, here)
        return text.replace("{interface}", self.resources["network_interface_name"])

    def _local_variables(self, variables: dict[str, str]) -> dict[str, str]:
        """`variables` with addresses as `local` has them, also where X_ADDR and X_PORT stand apart."""
        values = {name: self.local(value) for name, value in variables.items()}
        for name in [name for name in variables if name.endswith("_ADDR")]:
            port = name.removesuffix("_ADDR") + "_PORT"
            values[name], _, values[port] = self.local(f"{variables[name]}:{variables[port]}").rpartition(":")
        return values

    def _pass_on(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            self.errors.append(line.decode(errors="replace").rstrip())

    def fail(self, code: int) -> int:
        """Write the reason for a failure where SageMaker looks for it, and return the exit code."""
        words = " ".join(self.script)
        reason = f"ExecuteUserScriptError: exit code {code}\nCommand: {words}\n" + "\n".join(self.errors)
        (self.root / "output" / "failure").write_text(reason[:1024])
        return code if 0 < code < 256 else 1

    def end(self) -> None:
        """End what still runs; the container would be gone at once."""
        for process in self.started:
            if process.poll() is None:
                process.terminate()
        for process in self.started:
            try:
                process.wait(timeout=LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def run_members(host: Host, members: list[dict[str, Any]]) -> int:
    """Start the members that own drivers have for this host; the exit code of the first that fails, or 0."""
    awaited: list[subprocess.Popen[bytes]] = []
    leaving: list[subprocess.Popen[bytes]] = []
    for member in members:
        if member["role"] == "rendezvous":
            address, _, port = host.local(member["address"]).rpartition(":")
            bound = address if host.stand_in else "0.0.0.0"  # other hosts must reach it
            command = [sys.executable, "-I", "-S", str(HERE / "horovod_rendezvous.py"), bound, port]
        else:
            command = host.script
        process = host.start(command, **member["environment"], **host.subnet())
        if member["awaited"]:
            awaited.append(process)
        elif member["leaves"]:
            leaving.append(process)
    # A host without anybody to wait for has servers and workers, which leave when their chief does.
    code = _first_failure(awaited or leaving)
    if code == 0 and len(host.started) > len(awaited) + len(leaving):
        time.sleep(LINGER_SECONDS)  # ranks of other hosts still say good-bye to the rendezvous
    return code


def run_parameter_server(host: Host) -> int:
    """The classic mode: a server beside the script on every host; all but the master wait until it has gone."""
    beside = contract.parameter_server_config(host.hosts, host.name, server=True)
    config = contract.parameter_server_config(host.hosts, host.name)
    server = host.start([sys.executable, str(HERE / "parameter_server.py"), host.local(json.dumps(beside))])
    code = host.start(host.script, TF_CONFIG=json.dumps(config)).wait()
    if code == 0 and config["task"]["type"] != "master":
        server.wait()  # it leaves when the master does
    return code


def run_mirrored(host: Host) -> int:
    """MultiWorkerMirroredStrategy: one worker on every host."""
    config = contract.mirrored_config(host.hosts, host.name)
    return host.start(host.script, TF_CONFIG=json.dumps(config)).wait()


def run_torch(host: Host, per_host: int) -> int:
    """torchrun on every host, which starts `per_host` workers."""
    words = contract.torchrun(host.hosts, host.name, per_host)
    addresses = host.stand_in.get("addresses", {})
    if addresses and len(host.hosts) > 1:
        address, _, port = addresses[f"{host.hosts[0]}:{contract.TORCH_PORT}"].rpartition(":")
        words[words.index("--master_addr") + 1], words[words.index("--master_port") + 1] = address, port
    interface = host.resources["network_interface_name"]
    command = [sys.executable, "-m", "torch.distributed.run", *words, *host.script[1:]]
    return host.start(command, GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=interface).wait()


def run_mpi(host: Host) -> int:
    """mpirun on the first host. The others would only keep an sshd, by which mpirun starts its ranks there."""
    if host.name != host.hosts[0]:
        return 0
    command = host.stand_in["mpirun"]
    return host.start([*command, sys.executable, "-m", "mpi4py", *host.script[1:]]).wait()


def run_classic(host: Host) -> int:
    """What the toolkit does for the hyperparameters of this job."""
    per_host = int(host.toolkit.get("sagemaker_mpi_num_of_processes_per_host", 1))
    if host.toolkit.get("sagemaker_parameter_server_enabled") and len(host.hosts) > 1:
        return run_parameter_server(host)
    if host.toolkit.get("sagemaker_mpi_enabled"):
        return run_mpi(host)
    if host.toolkit.get("sagemaker_multi_worker_mirrored_strategy_enabled"):
        return run_mirrored(host)
    if host.toolkit.get("sagemaker_torch_distributed_enabled"):
        return run_torch(host, per_host)
    return host.start(host.script).wait()


def _first_failure(processes: list[subprocess.Popen[bytes]]) -> int:
    """Wait for all, but no longer than until one fails; its exit code, or 0."""
    ended = threading.Condition()
    codes: list[int] = []

    def wait(process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        with ended:
            codes.append(code)
            ended.notify()

    for process in processes:
        threading.Thread(target=wait, args=(process,), daemon=True).start()
    with ended:
        ended.wait_for(lambda: len(codes) == len(processes) or any(codes))
    return next((code for code in codes if code != 0), 0)


def _is_known(name: str) -> bool:
    try:
        socket.gethostbyname(name)
    except OSError:
        return False
    return True


def main() -> int:
    """Play this host's part; the container's exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    host = Host(Path(os.environ.get("SAGEMAKER_BASE_DIR", contract.OPT_ML)))
    host.lay_out()
    if not host.stand_in:  # in the stand-in names are known from the start, or not used at all
        host.wait_for_names()
    members = HERE / "members.json"
    if not members.is_file():
        members = host.root / "members.json"
    try:
        listed = json.loads(members.read_text()) if members.is_file() else None
        code = run_classic(host) if listed is None else run_members(host, listed[host.name])
        return host.fail(code) if code else 0
    finally:
        host.end()


if __name__ == "__main__":
    sys.exit(main())
