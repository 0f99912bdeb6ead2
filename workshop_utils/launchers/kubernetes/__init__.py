"""Kubernetes: the job as a custom resource, which an operator turns into pods.

    from workshop_utils.launchers.kubernetes import Kubernetes, StandIn
from workshop_utils.launchers.kubernetes.launcher import StandIn as EmulatedKubernetes

    place = Kubernetes(namespace="team-a", image="ghcr.io/me/workshop-pytorch:cpu")
    print(place.render(job))                  # YAML for kubectl; sends nothing, needs no cluster
    print(place.dry_run(job))                 # what a cluster would make of it, or has against it, by field
    with play(job) as run:                    # the same pods as processes of this machine
        run.wait()
    with place.launch(job) as run:            # on the cluster; what was made is deleted on leaving
        run.wait()

| module | concept |
| --- | --- |
| `settings` | what is said of the place, and which kind carries out which strategy |
| `pods`, `files` | what every pod looks like, and what travels to it |
| `kinds` | what a TFJob, a PyTorchJob, an MPIJob, a TrainJob and a Job look like |
| `manifest` | the objects of a job, and their YAML |
| `check`, `crds/` | what is wrong with an object, whatever its kind; which fields the operators' kinds have |
| `rules` | what the operators ask for beyond that |
| `operators`, `play` | what an operator makes of a manifest, and the pods as local processes |
| `calls`, `cluster` | a call to a cluster, with errors for people; what is asked of it |
| `launcher`, `run` | the launcher, and the run that it gives |
| `kubectl` | the same by hand: kubectl's line for each step, beside that in Python |
"""

from workshop_utils.launchers.kubernetes.launcher import Kubernetes, StandIn
from workshop_utils.launchers.kubernetes.launcher import StandIn as EmulatedKubernetes
from workshop_utils.launchers.kubernetes.play import play

__all__ = ["EmulatedKubernetes", "Kubernetes", "StandIn", "play"]
