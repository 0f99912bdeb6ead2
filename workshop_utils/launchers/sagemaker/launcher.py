"""The launcher: renders a job's request, and launches it once somebody has agreed to the cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import PrivateAttr

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.process_run import await_horovod
from workshop_utils.launchers.sagemaker import account, preflight, request, sdk, upload
from workshop_utils.launchers.sagemaker.calls import Aws
from workshop_utils.launchers.sagemaker.hosts import layout
from workshop_utils.launchers.sagemaker.preflight import Preflight
from workshop_utils.launchers.sagemaker.request import Request
from workshop_utils.launchers.sagemaker.run import SageMakerRun
from workshop_utils.launchers.sagemaker.settings import Settings


class SageMaker(Settings):
    """Launches jobs on SageMaker. Its fields are those of `Settings`.

    `aws` is the account to use; by default the one of the environment: AWS_PROFILE and its like, or the stand-in of
    AWS_ENDPOINT_URL. `ask` puts the question before something is paid for, by default on the terminal or in the
    notebook.
    """

    _aws: Aws | None = PrivateAttr(None)
    _ask: Callable[[str], str] | None = PrivateAttr(None)

    def __init__(
        self, /, aws: Aws | None = None, ask: Callable[[str], str] | None = None, **values: Any
    ) -> None:
        super().__init__(**values)
        self._aws, self._ask = aws, ask

    def within(self, aws: Aws) -> SageMaker:
        """The same place in the account of `aws`."""
        return type(self)(aws, self._ask, **self.model_dump(exclude_unset=True))

    @property
    def aws(self) -> Aws:
        """The account in whose name calls are made; which of two it is, its text says."""
        if self._aws is None:
            self._aws = Aws.connect(self.region_name)
        return self._aws

    def render(self, job: TrainingJob) -> Request:
        """The request that `launch` would send. Sends nothing, and needs no account.

        Raises:
            JobError: for what SageMaker would refuse, or would take and then not do.
        """
        if self.mode == "model_trainer":
            nobody = Aws(
                self.region_name, credentials=account.CREDENTIALS
            )  # it must be given some; they go nowhere
            return sdk.send(job, self, nobody, render=True)
        return request.build(job, self)

    def preflight(self, job: TrainingJob) -> Preflight:
        """What a launch may cost at most, and the quota that it needs. Starts nothing. Raises JobError as `render`."""
        return preflight.look(self.render(job), self.aws, self.keep_alive)

    def launch(self, job: TrainingJob) -> SageMakerRun:
        """Bring source and data to S3, and start the job. Asks first unless `confirm`, or nothing is paid for.

        Raises:
            JobError: as `render` does; nothing has been sent then.
            NotConfirmed: if nobody agrees to the cost; nothing has been sent then.
            AwsError: where AWS refuses; the message says what to do.
        """
        described = self.render(job)
        outlook = preflight.look(described, self.aws, self.keep_alive)
        preflight.agree(outlook, self.confirm or self.aws.is_stand_in, self._ask)
        if self.aws.is_stand_in:
            await_horovod(job)
        upload.bring(job, described, self, self.aws)
        if self.mode == "model_trainer":
            described = sdk.send(job, self, self.aws, render=False)
        else:
            self.aws.call("sagemaker", "create_training_job", **described.body)
        return SageMakerRun(described, self.aws, outlook, layout(job, self).hosts)
