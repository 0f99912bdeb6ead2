"""Kubernetes: the job as a custom resource, which an operator turns into pods.

    from workshop_utils.launchers.kubernetes import EmulatedKubernetes, Kubernetes

    target = Kubernetes(namespace="team-a", registry="123456789012.dkr.ecr.us-west-2.amazonaws.com")
    print(target.render(job))                 # YAML for kubectl; sends nothing, needs no cluster
    with EmulatedKubernetes().launch(job) as run:    # the same pods as processes of this machine
        run.wait()
    with target.launch(job) as run:           # on the cluster; what was made is deleted on leaving
        run.wait()

| module | concept |
| --- | --- |
| `settings` | namespace, image and kind; which kind runs which strategy |
| `config_maps` | the archives that travel with a job: its folder, and its data |
| `pods` | what every pod looks like, and what it mounts |
| `manifest` | the objects of a job, kind by kind, and their YAML |
| `check`, `crds/` | what a cluster or an operator would refuse in an object |
| `operators` | what an operator makes of a manifest: pods, and the variables by which they find each other |
| `cluster` | what a cluster is asked, with errors for people |
| `launcher` | the launcher, and the run that it gives |
| `emulator` | the pods of a manifest as local processes |
"""

from workshop_utils import optional

optional.require("kubernetes")

from workshop_utils.launchers.kubernetes.emulator import EmulatedKubernetes  # noqa: E402
from workshop_utils.launchers.kubernetes.launcher import Kubernetes  # noqa: E402

__all__ = ["EmulatedKubernetes", "Kubernetes"]
