"""SageMaker: training jobs on instances that exist for as long as the job does.

    from workshop_utils.launchers.sagemaker import SageMaker

    launcher = SageMaker(role="arn:aws:iam::123456789012:role/workshop", region="us-east-1")
    print(launcher.render(job))               # the CreateTrainingJob request; sends nothing, needs no account
    with launcher.launch(job) as run:         # says what it may cost and asks first
        run.wait()
    run.metrics

A launch, in order:

| module | concept |
| --- | --- |
| `settings` | what a place.yaml holds: role, instances, network, limits |
| `submission` | what a job becomes: hosts, name, image, hyperparameters, addresses on S3; and what is refused |
| `toolkit` | classic script mode: what the toolkit in AWS's images is told, and what it starts on a host |
| `container.yaml` | the files and variables that a container has |
| `request` | the CreateTrainingJob request, which the Python SDK's ModelTrainer makes, and the SDK's drivers with it |
| `price` | what a launch may cost, and the question before it |
| `account` | AWS, or moto on this machine: its calls, its buckets, its stacks |
| `launcher` | the launcher, and the run on SageMaker |
| `cleanup` | finds and removes what the workshop made |
| `emulator`, `emulated_instance` | emulated instances, which need no account; the programs that run on them |
"""

from workshop_utils import optional

optional.require("aws")

from workshop_utils.launchers.sagemaker.emulator import EmulatedSageMaker  # noqa: E402
from workshop_utils.launchers.sagemaker.launcher import SageMaker  # noqa: E402

__all__ = ["EmulatedSageMaker", "SageMaker"]
