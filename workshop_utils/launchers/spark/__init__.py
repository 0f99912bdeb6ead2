"""Spark as a place: the same TrainingJob on `local[N]`, on a cluster of Spark's own, or in pods.

    with Spark().launch(TrainingJob.load("jobs/mnist_torch_ddp")) as run:
        run.wait()

| module | what it holds |
| --- | --- |
| `settings` | what is said of the place: master, restarts, memory |
| `launcher` | `Spark`, which renders and launches, and its run |
| `driver` | a program: starts the ranks through TorchDistributor |
| `rank` | a program: one rank, whose lines get its name |
| `cluster` | a stand-alone cluster of real processes on this machine |

A script that imports pyspark is a Spark program, and runs as the driver itself, as with `spark-submit`; any other is a
rank's, and is started once for each worker. What a job with a `requirements.txt` needs lies in an environment of its
own, made on the first launch.

Spark unpickles what comes through its sockets: functions on their way to the executors, results on their way back. So
here everything listens on loopback alone, asks for a secret that each run or cluster has anew, and no web page is
served without need. On a real cluster, name its secret in `secret_file`, and keep its network closed.
"""

from workshop_utils.launchers.spark.cluster import StandaloneCluster
from workshop_utils.launchers.spark.launcher import Spark, SparkRequest, SparkRun
from workshop_utils.launchers.spark.settings import Settings

__all__ = ["Settings", "Spark", "SparkRequest", "SparkRun", "StandaloneCluster"]
