"""SageMaker: training jobs on instances that exist for as long as the job does.

    from workshop_utils.launchers.sagemaker import SageMaker

    place = SageMaker(role="arn:aws:iam::123456789012:role/workshop", instance_type="ml.c5.xlarge", region="us-east-1")
    print(place.render(job))                  # the CreateTrainingJob request; sends nothing, needs no account
    with place.launch(job) as run:            # says what it may cost and asks first
        run.wait()
    run.metrics

A launch, in order:

| module | concept |
| --- | --- |
| `settings` | what is said of the place: role, instances, network, limits |
| `request`, `hosts`, `toolkit`, `images` | what a job becomes: hosts, name, hyperparameters, image |
| `members`, `driver` | with `mode: drivers`: what each host starts, and the program that starts it |
| `trainer` | the Python SDK's ModelTrainer, which makes the request, to be shown or to be sent |
| `check` | whether SageMaker would take it |
| `preflight`, `prices` | what a launch may cost, and the question before it |
| `account`, `errors` | AWS, or moto on this machine; what AWS says no with, in words for people |
| `upload` | source and data, brought to S3 |
| `launcher`, `run` | the launchers, and the run on SageMaker |
| `cleanup` | finds and removes what the workshop made |

Without an account:

| module | concept |
| --- | --- |
| `contract` | what a training container finds |
| `instances` | emulated instances, which keep the contract |
| `emulated_host`, `emulated_toolkit`, `parameter_server` | their container, and what the toolkit starts in it |
"""

from workshop_utils.launchers.sagemaker.launcher import SageMaker, StandIn
from workshop_utils.launchers.sagemaker.launcher import StandIn as EmulatedSageMaker

__all__ = ["EmulatedSageMaker", "SageMaker", "StandIn"]
