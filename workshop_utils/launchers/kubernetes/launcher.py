"""The launcher: renders a job's manifest, and sends it."""

from __future__ import annotations

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.kubernetes import calls, files, manifest
from workshop_utils.launchers.kubernetes.cluster import Cluster, DryRun
from workshop_utils.launchers.kubernetes.manifest import Manifest
from workshop_utils.launchers.kubernetes.operators import pods_of
from workshop_utils.launchers.kubernetes.play import PlayedRun, play
from workshop_utils.launchers.kubernetes.run import KubernetesRun
from workshop_utils.launchers.kubernetes.settings import Settings
from workshop_utils.launchers.local.environment import await_horovod


class Kubernetes(Settings):
    """Launches jobs on a cluster. Its fields are those of `Settings`."""

    def render(self, job: TrainingJob) -> Manifest:
        """The manifest that `launch` would send. Sends nothing, and needs no cluster.

        Raises:
            JobError: for what Kubernetes, or an operator, would refuse.
        """
        return manifest.build(job, self)

    def dry_run(self, job: TrainingJob) -> DryRun:
        """Have the cluster of KUBECONFIG check what `launch` would send, as kubectl's --dry-run=server does.

        The cluster, and the operators on it, say what they would make of each object; nothing is made.

        Raises:
            JobError: as `launch` does; nothing has been sent then.
            KubernetesError: with what the cluster has against the objects, by field.
        """
        return self._cluster(self.render(job), job).dry_run()

    def launch(self, job: TrainingJob) -> KubernetesRun:
        """Make the job's objects on the cluster of KUBECONFIG.

        Raises:
            JobError: as `render` does, or if the data is too large; nothing has been sent then.
            KubernetesError: where the cluster refuses; what was made before is deleted again.
        """
        described = self.render(job)
        cluster = self._cluster(described, job)
        cluster.create()
        return KubernetesRun(cluster, pods_of(described))

    def _cluster(self, described: Manifest, job: TrainingJob) -> Cluster:
        found = files.config_maps(job, with_data=self.data_claim is None)
        return Cluster(calls.connect(self.context), described, found)


class StandIn(Settings):
    """The same place without a cluster: the pods of the manifest are processes of this machine (see `play`)."""

    def render(self, job: TrainingJob) -> Manifest:
        """The manifest that is played, which is the one that would be sent. Raises JobError as there."""
        return manifest.build(job, self)

    def launch(self, job: TrainingJob) -> PlayedRun:
        """Start the pods. Raises JobError as `render` does, and for what cannot be played."""
        request = self.render(job)
        await_horovod(job)
        return play(job, request)
