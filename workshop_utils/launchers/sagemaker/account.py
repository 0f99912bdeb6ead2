"""Which account answers: AWS itself where AWS_PROFILE is set, and otherwise a stand-in on this machine.

aws = connect()          # the stand-in is started when it is first needed, and ends with this process
print(aws)               # which of the two answers
"""

from __future__ import annotations

import functools
import json
import os
import queue
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Self

from workshop_utils.launchers.sagemaker.calls import Aws, AwsError
from workshop_utils.processes.group import Event, Process, ProcessGroup

CREDENTIALS = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing"}
SERVER = "workshop_utils.launchers.sagemaker.account_server"
START_SECONDS = 60.0  # moto's many services take a while to be imported
LIFE_SECONDS = 86_400.0


class StandInAccount:
    """An account on this machine: a server process, which ends with this object's `close`, or with this process.

    `endpoint` is where it listens.
    """

    def __init__(self) -> None:
        self._said: queue.Queue[str] = queue.Queue()
        self._ended: queue.Queue[str] = queue.Queue()
        foreign = ("AWS_", "SAGEMAKER_", "MOTO_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        # No configuration of the user's own, no look-up of an instance's identity, and a region for who names none.
        environment |= {
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        # Runs that are carried out have their folders in the server's own, which goes with it. Its name is short, since
        # Open MPI puts sockets below it.
        scratch = Path(tempfile.gettempdir()) / f"workshop-{uuid.uuid4().hex[:8]}"
        environment["TMPDIR"] = str(scratch)
        root = str(Path(__file__).parents[3])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
        server = Process("account", (sys.executable, "-m", SERVER), environment, tempfile.gettempdir())
        self._group = ProcessGroup([server], self._on_event, timeout_seconds=LIFE_SECONDS, scratch=scratch)
        try:
            line = self._said.get(timeout=START_SECONDS)
        except queue.Empty:
            self.close()
            raise AwsError(f"the stand-in for AWS did not start within {START_SECONDS:.0f} s") from None
        if not line.startswith("listening at "):
            raise AwsError(f"the stand-in for AWS could not be started: {line}")
        self.endpoint = line.removeprefix("listening at ")

    def _on_event(self, event: Event) -> None:
        if event["event"] == "line":
            self._said.put(event["text"])
        elif event["event"] == "ended":
            self._said.put("it ended")
            self._ended.put("it ended")

    def aws(self, region: str = "us-east-1") -> Aws:
        """Clients of this account in `region`."""
        return Aws(region, self.endpoint, dict(CREDENTIALS))

    def close(self) -> None:
        """End the server, and all that it has started."""
        self._group.stop()
        self._ended.get()
        self._ended.put("it ended")  # closing twice does no harm

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@functools.cache
def _stand_in() -> StandInAccount:
    return StandInAccount()


def connect(region: str | None = None) -> Aws:
    """The account that answers here: that of AWS_PROFILE, or the stand-in, one for this process."""
    return profile(region) if os.environ.get("AWS_PROFILE") else connect_to_stand_in(_region(region))


def connect_to_stand_in(region: str = "us-east-1") -> Aws:
    """The stand-in, started when it is first asked for; it ends with this process."""
    return _stand_in().aws(region)


def profile(region: str | None = None) -> Aws:
    """AWS itself, or the endpoint that AWS_ENDPOINT_URL names, with the environment's credentials."""
    return Aws.connect(_region(region))


def _region(name: str | None) -> str:
    return name or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"


TRUST = {
    "Version": "2012-10-17",
    "Statement": [
        {"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}
    ],
}


def ensure_role(arn: str, aws: Aws) -> None:
    """Make the role `arn` in a stand-in; in AWS itself the stack of jobs/clusters/sagemaker/ does.

    Raises:
        AwsError: if `aws` is AWS itself and there is no such role.
    """
    name = arn.rpartition("/")[2]
    try:
        aws.call("iam", "get_role", RoleName=name)
    except AwsError:
        if not aws.is_stand_in:
            raise
        aws.call("iam", "create_role", RoleName=name, AssumeRolePolicyDocument=json.dumps(TRUST))
