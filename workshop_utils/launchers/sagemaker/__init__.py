"""SageMaker: training jobs on instances that exist for as long as the job does.

    from workshop_utils.launchers.sagemaker import SageMaker

    place = SageMaker(role="arn:aws:iam::123456789012:role/workshop", instance_type="ml.c5.xlarge", region="us-east-1")
    print(place.render(job))                  # the CreateTrainingJob request; sends nothing, needs no account
    with place.launch(job) as run:            # says what it may cost and asks first
        run.wait()
    run.metrics

| module | concept |
| --- | --- |
| `settings` | what is said of the place: role, instances, network, limits |
| `hosts` | which instances a job takes, and who runs on which |
| `images` | container images, and which have Horovod |
| `toolkit` | the hyperparameters of classic script mode |
| `request`, `check` | the request, and whether SageMaker would take it |
| `source`, `upload` | what a job brings along, and how it gets to S3 |
| `calls` | a call to AWS: patience, and errors for people |
| `prices`, `preflight` | what a launch may cost, and the question before it |
| `sdk`, `model_trainer` | the Python SDK's ModelTrainer, in a process of its own |
| `launcher`, `run` | the launcher, and the run that it gives |
| `contract` | what a training container finds |
| `container`, `parameter_server` | programs: a container's entry point, and the server beside the script |
| `instances` | a local stand-in for N instances |
| `account`, `account_server` | a local stand-in for the account |
| `cleanup` | finds and removes what the workshop made |
"""

from workshop_utils.launchers.sagemaker.launcher import SageMaker

__all__ = ["SageMaker"]
