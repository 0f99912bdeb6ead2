"""Network namespaces for the processes of one run; used by the supervisor, so the standard library alone.

A namespace made here has no name and no file: it lives as long as a process in it, or a descriptor of it, does
(namespaces(7)).
"""

import ctypes
import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

CLONE_NEWUTS = 0x04000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000


def leave_network() -> None:
    """Move this process into a network namespace of its own, which holds nothing but a loopback that is down."""
    _unshare(CLONE_NEWNET)


def leave_host(name: str) -> None:
    """The same, and give this process's host a name of its own.

    A name that is an address resolves to itself, so that a framework that looks for its own host finds its network:
    Horovod does for its process sets, whatever network interface it was told to use.
    """
    _unshare(CLONE_NEWNET | CLONE_NEWUTS)
    socket.sethostname(name)


def name_host(name: str) -> None:
    """Give this process's host a name of its own, and leave its network as it is."""
    try:
        _unshare(CLONE_NEWUTS)
    except PermissionError:
        _unshare_as_user(CLONE_NEWUTS)
    socket.sethostname(name)


def leave_network_as_user() -> None:
    """`leave_network` for a user without privileges."""
    _unshare_as_user(CLONE_NEWNET)


def _unshare_as_user(flags: int) -> None:
    """Become root of a user namespace that holds the new ones."""
    user, group = os.geteuid(), os.getegid()
    _unshare(CLONE_NEWUSER | flags)
    Path("/proc/self/setgroups").write_text("deny")  # without it the kernel refuses the group's mapping
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def hold_network(pid: int) -> int:
    """A descriptor that keeps the network of `pid` when that ends: it may still have to pass on what others say."""
    return os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)


def carry_out(commands: Sequence[Sequence[str]], pid: int | None = None) -> None:
    """Run `commands` one after the other, with `{pid}` filled in. Raises OSError with the message of one that fails."""
    for command in commands:
        words = [word.replace("{pid}", str(pid)) for word in command]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise OSError(f"`{' '.join(words)}` failed: {done.stderr.strip() or done.returncode}")


def _unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")
