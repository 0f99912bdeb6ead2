"""TorchX: one description of an application for several schedulers.

    from workshop_utils.launchers.torchx import TorchX

    place = TorchX()                                     # processes of this machine
    place = TorchX(scheduler="kubernetes", queue="training", instance_type="trn1.32xlarge", processes_per_node=32)
    print(place.render(job))                             # the application, or the Volcano Job; sends nothing
    with place.launch(job) as run:
        run.wait()

TorchX's urllib3 is older than the workshop's, so it lives in an environment of its own (see `environments`), and is
spoken to through a program there.

| module | concept |
| --- | --- |
| `settings` | what is said of the place |
| `components` | the workshop's components and instances; TorchX's environment reads it, `torchx run` too |
| `driver` | the program that speaks to TorchX |
| `launcher`, `run` | the launcher, and the run that it gives |
| `etcd` | a meeting point on this machine |
"""

from workshop_utils.launchers.torchx.launcher import TorchX

__all__ = ["TorchX"]
