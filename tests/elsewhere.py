"""Python as on a system that is not Linux: `python elsewhere.py [SCRIPT | -m MODULE | -c PROGRAM] ARGUMENT...`.

`sys.platform` is "darwin", there are no files in /proc, /sys and /dev/shm, and what only Linux has is taken out of
Python's modules; but epoll stays, in the place of macOS's kqueue. What this Python starts as `sys.executable` is such a
Python as well, from the supervisor to the ranks.
"""

import errno
import io
import os
import runpy
import signal
import socket
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import psutil  # reads its own table of processes on any system, so it keeps /proc, by another name

HIDDEN = ("/proc", "/sys", "/dev/shm")
ONLY_LINUX = {
    os: (
        "pidfd_open",
        "sched_getaffinity",
        "sched_setaffinity",
        "memfd_create",
        "posix_fadvise",
        "unshare",
        "setns",
    ),
    signal: ("sigtimedwait", "pidfd_send_signal"),
    socket: ("TCP_INFO", "TCP_QUICKACK", "TCP_USER_TIMEOUT", "SO_PEERCRED"),
}
PATHS = {os: ("open", "stat", "lstat", "scandir", "listdir", "readlink", "access"), io: ("open",)}


def hiding(call):
    """`call`, for which no file of Linux's own exists."""

    def on_visible_files(path=".", *arguments, **options):
        if isinstance(path, (str, Path)) and str(path).startswith(HIDDEN):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return call(path, *arguments, **options)

    return on_visible_files


def leave_linux() -> None:
    psutil.PROCFS_PATH = os.environ["ELSEWHERE_PROC"]
    for module, names in ONLY_LINUX.items():
        for name in names:
            vars(module).pop(name, None)
    for module, names in PATHS.items():
        for name in names:
            setattr(module, name, hiding(getattr(module, name)))
    sysconfig.get_config_vars()  # from a file that is named after the platform
    sys.modules["_scproxy"] = SimpleNamespace(
        _get_proxy_settings=dict, _get_proxies=dict
    )  # of macOS's Python
    sys.platform = "darwin"
    sys.executable = os.environ["ELSEWHERE_PYTHON"]


if __name__ == "__main__":
    del sys.argv[0]
    while sys.argv[0] in ("-u", "-E", "-s", "-S"):
        del sys.argv[0]
    leave_linux()
    if sys.argv[0] in ("-m", "-c"):
        kind, what = sys.argv[:2]
        del sys.argv[0]
        sys.path[0] = ""
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
