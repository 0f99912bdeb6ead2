"""Before anything is paid for: what a launch may cost at most, which quota it needs, and whether to go on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from workshop_utils.launchers.sagemaker import prices
from workshop_utils.launchers.sagemaker.calls import Aws, AwsError
from workshop_utils.launchers.sagemaker.request import Request
from workshop_utils.quantities import seconds_of


class NotConfirmed(ValueError):
    """Nothing was started, since nobody has agreed to the cost."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class Preflight:
    """What is known before a launch.

    Attributes:
        instances, instance_type, region: what is asked for.
        seconds: after how long the service ends the job at the latest, with the time for which it is kept warm.
        dollars_an_hour: of one instance; None where no price is known.
        price_source: where the price is from.
        quota: how many such instances the account may use for training; None where that could not be read.
        is_stand_in: whether nothing is paid for at all.
    """

    instances: int
    instance_type: str
    region: str
    seconds: float
    dollars_an_hour: float | None
    price_source: str
    spot: bool = False
    quota: float | None = None
    is_stand_in: bool = False

    @property
    def most_dollars(self) -> float | None:
        """Instances × price × time limit, the most that this job can cost; spot is not counted."""
        if self.dollars_an_hour is None:
            return None
        return self.instances * self.dollars_an_hour * self.seconds / 3600

    @property
    def quota_name(self) -> str:
        """The quota that must be at least `instances`, as Service Quotas calls it."""
        return f"{self.instance_type} for {'spot training job' if self.spot else 'training job'} usage"

    @property
    def quota_suffices(self) -> bool:
        """Whether the quota is known to be large enough, or not known."""
        return self.quota is None or self.quota >= self.instances

    def __str__(self) -> str:
        minutes = f"{self.seconds / 60:g} min"
        lines = [f"{self.instances} × {self.instance_type} in {self.region}, for at most {minutes}"]
        if self.most_dollars is None:
            lines.append("price: not known here; see AWS's price page for SageMaker, training")
        else:
            lines.append(
                f"price: {self.instances} × {self.dollars_an_hour:g} $/h × {minutes} = at most "
                f"{_dollars(self.most_dollars)} ({self.price_source})"
            )
            if self.spot:
                lines.append("spot: usually far less, and the instances may be taken away")
        known = "it could not be read" if self.quota is None else f"it is {self.quota:g}"
        if self.is_stand_in:
            known = "the stand-in has no quotas, and costs nothing"
        lines.append(f"quota: '{self.quota_name}' must be at least {self.instances}; {known}")
        return "\n".join(lines)

    __repr__ = __str__


def look(request: Request, aws: Aws, keep_alive: str | None = None) -> Preflight:
    """The pre-flight of `request`. What the account does not let one read is left out.

    Raises:
        AwsError: if there are no credentials, they have expired, or are those of another account than the role's.
    """
    body = request.body
    if not aws.is_stand_in:
        _check_identity(body["RoleArn"], aws)
    resources, limits = body["ResourceConfig"], body["StoppingCondition"]
    kind, spot = resources["InstanceType"], bool(body.get("EnableManagedSpotTraining"))
    price, source = prices.dollars_an_hour(kind), f"table of {prices.AS_OF} for us-east-1"
    if not aws.is_stand_in:
        today = prices.from_price_list(aws, kind)
        if today is not None:
            price, source = today, f"AWS's price list for {aws.region}, today"
    return Preflight(
        instances=resources["InstanceCount"],
        instance_type=kind,
        region=aws.region,
        seconds=limits["MaxRuntimeInSeconds"] + (seconds_of(keep_alive) if keep_alive else 0.0),
        dollars_an_hour=price,
        price_source=source,
        spot=spot,
        quota=None if aws.is_stand_in else _quota(aws, kind, spot),
        is_stand_in=aws.is_stand_in,
    )


def _check_identity(role: str, aws: Aws) -> None:
    """Raise AwsError where the caller is nobody, or somebody of another account."""
    mine = aws.call("sts", "get_caller_identity")["Account"]
    theirs = role.split(":")[4]
    if mine != theirs:
        raise AwsError(
            f"role is {role}, of account {theirs}, but your credentials are of account {mine}; name a role of your own "
            "account, or another profile in AWS_PROFILE"
        )


def agree(preflight: Preflight, confirmed: bool, ask: Callable[[str], str] | None = None) -> None:
    """Return if the launch may go on. `ask` puts the question; by default a terminal or a notebook does.

    Raises:
        NotConfirmed: if the answer is not yes, or there is nobody to ask.
        AwsError: if the quota is known to be too small: no answer would help.
    """
    if not preflight.quota_suffices:
        raise AwsError(
            f"the quota '{preflight.quota_name}' is {preflight.quota:g}, and the job needs {preflight.instances}: ask "
            "for more under Service Quotas, Amazon SageMaker (a day or two), or take another instance type",
            "ResourceLimitExceeded",
        )
    if confirmed:
        return
    if ask is None and not _somebody_is_there():
        raise NotConfirmed(
            f"nobody is here to be asked, so nothing was started. Set confirm to true to agree to:\n{preflight}"
        )
    answer = (ask or input)(f"{preflight}\nStart it? [y/N] ")
    if answer.strip().lower() not in ("y", "yes"):
        raise NotConfirmed("nothing was started")


def _somebody_is_there() -> bool:
    return "ipykernel" in sys.modules or sys.stdin.isatty()


def _quota(aws: Aws, instance_type: str, spot: bool) -> float | None:
    name = f"{instance_type} for {'spot training job' if spot else 'training job'} usage"
    try:
        for quota in aws.pages("service-quotas", "list_service_quotas", "Quotas", ServiceCode="sagemaker"):
            if quota.get("QuotaName") == name:
                return float(quota["Value"])
    except AwsError:
        return None  # it takes a permission that not everybody has; the service itself will say
    return None


def _dollars(value: float) -> str:
    return f"{value:.2f} $" if value >= 0.1 else f"{value:.3f} $"
