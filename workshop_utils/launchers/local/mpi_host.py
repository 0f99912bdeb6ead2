"""The host of one MPI rank in an emulated network: what a machine with an ssh server is in a cluster.

mpirun starts its daemon on another host by `AGENT HOST COMMAND...`, where AGENT is ssh as a rule. Here a host is a
process in a network namespace of its own, and this program is both ends of the way there:

    python -I -S mpi_host.py serve ADDRESS PORT        in the namespace: waits for a command, and becomes it
    python -I -S mpi_host.py call PORT HOST COMMAND... the agent: hands the command over, and ends when it has ended

The command goes through the emulated network, with a proof that who sends it knows the run's secret
(WORKSHOP_SECRET). A host takes one command only. It needs the standard library alone.

Source: PRRTE, `plm_ssh_agent`, of which Open MPI 5 makes its mpirun.
"""

import hmac
import os
import socket
import sys
import time

PATIENCE_SECONDS = 60.0
LARGEST_COMMAND_NBYTES = 1 << 20
DIGEST = "sha256"
PROOF_NBYTES = 32


def serve(address: str, port: int, secret: bytes) -> None:
    """Wait for the agent's command, then become it, in this process and with its environment.

    The connection stays open until the command has ended, however it does; its end tells the agent.
    """
    with socket.create_server((address, port)) as listener:
        while True:
            link, _ = listener.accept()
            link.settimeout(PATIENCE_SECONDS)
            command = _proved(link, secret)
            if command is not None:
                break
            link.close()
    link.set_inheritable(True)
    os.execv("/bin/sh", ["sh", "-c", command])


def _proved(link: socket.socket, secret: bytes) -> str | None:
    """The command that came, or None if its sender does not know the secret."""
    received = bytearray()
    try:
        while len(received) <= LARGEST_COMMAND_NBYTES and (part := link.recv(1 << 16)):
            received += part
    except OSError:
        return None  # the caller has gone, or is silent
    proof, command = bytes(received[:PROOF_NBYTES]), bytes(received[PROOF_NBYTES:])
    return command.decode() if hmac.compare_digest(proof, hmac.digest(secret, command, DIGEST)) else None


def call(port: int, host: str, command: str, secret: bytes) -> None:
    """Hand `command` to the host, which may not listen yet; return when it has ended.

    Raises:
        TimeoutError: if the host does not listen within a minute.
    """
    data = command.encode()
    with _connected(host, port) as link:
        link.sendall(hmac.digest(secret, data, DIGEST) + data)
        link.shutdown(socket.SHUT_WR)
        link.settimeout(None)
        while link.recv(1 << 16):  # nothing comes; only the end counts
            continue


def _connected(host: str, port: int) -> socket.socket:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return socket.create_connection((host, port), timeout=PATIENCE_SECONDS)
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the host {host} does not listen: {error}") from error
        time.sleep(0.05)


def main() -> None:
    """Serve or call, as the command line says."""
    secret = os.environ["WORKSHOP_SECRET"].encode()
    if sys.argv[1] == "serve":
        serve(sys.argv[2], int(sys.argv[3]), secret)
    else:
        call(int(sys.argv[2]), sys.argv[3], " ".join(sys.argv[4:]), secret)


if __name__ == "__main__":
    main()
