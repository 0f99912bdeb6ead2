"""TorchX: one description of an application for several schedulers.

    from workshop_utils.launchers.torchx import TorchX

    launcher = TorchX()                                  # processes of this machine
    launcher = TorchX(scheduler="kubernetes", queue="training", instance_type="trn1.32xlarge")
    print(launcher.render(job))                          # the application, or the Volcano Job; sends nothing
    with launcher.launch(job) as run:
        run.wait()

Each node of the job is one `torchrun`, which starts the node's workers (`nodes` and `processes_per_node` of the job; by
default one worker on each). TorchX's urllib3 is older than the workshop's, so it lives in an environment of its own
(see `setup.environments`), where a small program asks it.

| module | concept |
| --- | --- |
| `launcher` | the settings, the application that TorchX is asked about, and the start of what it describes here |
| `describe` | the program that asks TorchX, in its environment |
| `run` | the log of a torchrun, and the run on this machine |
| `volcano` | on a cluster: the rest of the Volcano Job, and the run |
| `etcd` | a rendezvous server on this machine |
"""

from workshop_utils.launchers.torchx.launcher import TorchX

__all__ = ["TorchX"]
