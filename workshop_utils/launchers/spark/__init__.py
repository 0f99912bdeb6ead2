"""Spark as a target: the same TrainingJob on `local[N]`, on a cluster of Spark's own, or in pods.

    with Spark().launch(TrainingJob.load("jobs/mnist_torch_ddp")) as run:
        run.wait()

| module | what it holds |
| --- | --- |
| `launcher` | `Spark`: its settings, how it renders and launches, and its run |
| `driver` | a program: starts the ranks as tasks of a barrier stage |
| `cluster` | a session for a notebook, and a stand-alone cluster of real processes on this machine |

The script of a `spark_program` is the driver itself, as with `spark-submit`. Any other script is a rank's: our driver
starts it once for each worker. What a job with a `requirements.txt` needs lies in an environment of its own, made on
the first launch.

Spark unpickles what comes through its sockets: functions on their way to the executors, results on their way back. So
here everything listens on loopback alone, asks for a secret that belongs to one run or cluster, and no web page is
served without need. On a real cluster, name its secret in `secret_file`, and keep its network closed.
"""

from workshop_utils.launchers.spark.cluster import StandaloneCluster, local_session
from workshop_utils.launchers.spark.launcher import Spark, SparkRequest, SparkRun

__all__ = ["Spark", "SparkRequest", "SparkRun", "StandaloneCluster", "local_session"]
