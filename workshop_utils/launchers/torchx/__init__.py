"""TorchX: one description of an application for several schedulers.

    from workshop_utils.launchers.torchx import TorchX

    place = TorchX()                                     # processes of this machine
    place = TorchX(scheduler="kubernetes", queue="training", instance_type="trn1.32xlarge", processes_per_node=32)
    print(place.render(job))                             # the application, or the Volcano Job; sends nothing
    with place.launch(job) as run:
        run.wait()

TorchX's urllib3 is older than the workshop's, so it lives in an environment of its own (see `environments`), where its
command line is called.

| module | concept |
| --- | --- |
| `settings` | scheduler, rendezvous, cluster |
| `components` | the workshop's component and instances: what is handed to `torchx run` |
| `launcher` | what `torchx run` is called with, here or for a cluster |
| `follow`, `run` | `torchx run` on this machine: a program that follows its log files, and the run |
| `volcano` | on a cluster: the rest of the Volcano Job, and the run |
| `etcd` | a rendezvous server on this machine |
"""

from workshop_utils.launchers.torchx.launcher import TorchX

__all__ = ["TorchX"]
