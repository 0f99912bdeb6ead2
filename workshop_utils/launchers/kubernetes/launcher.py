"""The launcher: renders a job's manifest, and sends it."""

from __future__ import annotations

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.kubernetes import calls, files, manifest
from workshop_utils.launchers.kubernetes.cluster import Cluster
from workshop_utils.launchers.kubernetes.manifest import Manifest
from workshop_utils.launchers.kubernetes.operators import pods_of
from workshop_utils.launchers.kubernetes.play import PlayedRun, play
from workshop_utils.launchers.kubernetes.run import KubernetesRun
from workshop_utils.launchers.kubernetes.settings import Settings


class Kubernetes(Settings):
    """Launches jobs on a cluster. Its fields are those of `Settings`."""

    def render(self, job: TrainingJob) -> Manifest:
        """The manifest that `launch` would send. Sends nothing, and needs no cluster.

        Raises:
            JobError: for what Kubernetes, or an operator, would refuse.
        """
        return manifest.build(job, self)

    def launch(self, job: TrainingJob) -> KubernetesRun:
        """Make the job's objects on the cluster of KUBECONFIG.

        Raises:
            JobError: as `render` does, or if the data is too large; nothing has been sent then.
            KubernetesError: where the cluster refuses; what was made before is deleted again.
        """
        described = self.render(job)
        found = files.config_maps(job, with_data=self.data_claim is None)
        cluster = Cluster(calls.connect(self.context), described, found)
        pods = pods_of(described)
        cluster.create()
        return KubernetesRun(cluster, pods)


class StandIn(Kubernetes):
    """The same place without a cluster: the pods of the manifest are processes of this machine (see `play`)."""

    def launch(self, job: TrainingJob) -> PlayedRun:  # type: ignore[override]
        """Start the pods. Raises JobError as `render` does, and for what cannot be played."""
        return play(job, self.render(job))
