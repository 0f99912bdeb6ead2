"""The launchers: SageMaker, once somebody has agreed to the cost, and its stand-in on this machine."""

from __future__ import annotations

from typing import Any

from pydantic import PrivateAttr

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.sagemaker import account, upload
from workshop_utils.launchers.sagemaker.account import Aws
from workshop_utils.launchers.sagemaker.instances import Instances, InstancesRun
from workshop_utils.launchers.sagemaker.preflight import Preflight, agree
from workshop_utils.launchers.sagemaker.request import Request, plan
from workshop_utils.launchers.sagemaker.run import SageMakerRun
from workshop_utils.launchers.sagemaker.settings import Settings


class SageMaker(Settings):
    """Launches jobs on SageMaker. Its fields are those of `Settings`.

    `aws` is the account to use; by default the one of the environment: AWS_PROFILE and its like, or the one at
    AWS_ENDPOINT_URL.
    """

    _aws: Aws | None = PrivateAttr(None)

    def __init__(self, /, aws: Aws | None = None, **values: Any) -> None:
        super().__init__(**values)
        self._aws = aws

    @property
    def aws(self) -> Aws:
        """The account in whose name calls are made; which of two it is, its text says."""
        if self._aws is None:
            self._aws = account.profile(self.region_name)
        return self._aws

    def render(self, job: TrainingJob) -> Request:
        """The request that `launch` would send. Sends nothing, and needs no account.

        Raises:
            JobError: for what SageMaker would refuse, or would take and then not do.
        """
        planned = plan(job, self)
        from workshop_utils.launchers.sagemaker import trainer  # the SDK takes seconds to be imported

        return trainer.render(planned)

    def preflight(self, job: TrainingJob) -> Preflight:
        """What a launch may cost at most, and the quota that it needs. Starts nothing. Raises JobError as `render`."""
        return Preflight(self.render(job).plan, self.aws.is_stand_in)

    def launch(self, job: TrainingJob) -> SageMakerRun:
        """Bring source and data to S3, and start the job. Asks first unless `confirm`, or nothing is paid for.

        Raises:
            JobError: as `render` does; nothing has been sent then.
            NotConfirmed: if nobody agrees to the cost; nothing has been sent then.
            AwsError: where AWS refuses; the message says what to do.
        """
        request = self.render(job)
        from workshop_utils.launchers.sagemaker import trainer

        agree(Preflight(request.plan), self.confirm or self.aws.is_stand_in)
        upload.bring(request.plan, self.aws)
        trainer.send(request, self.aws)
        return SageMakerRun(request.plan, self.aws)


class StandIn(Settings):
    """Launches on emulated instances what SageMaker would take; needs no account."""

    def render(self, job: TrainingJob) -> Request:
        """The request that SageMaker would be sent. Raises JobError as `SageMaker.render` does."""
        return SageMaker(**self.model_dump(exclude_unset=True)).render(job)

    def launch(self, job: TrainingJob) -> InstancesRun:
        """Carry the job out on this machine. Raises JobError as `render` does."""
        self.render(job)
        return Instances(**self.model_dump(exclude_unset=True)).launch(job)
