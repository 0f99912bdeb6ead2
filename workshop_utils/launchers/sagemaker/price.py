"""Before anything is paid for: what a launch may cost at most, which quota it needs, and whether to go on.

No package carries the prices of SageMaker's instances. Those below are on-demand training prices of us-east-1 in US
dollars an hour as they were known in 2025, written down without access to AWS's price page and not checked since; other
regions cost up to a third more. They give a sense of scale. AWS's invoice is what counts.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from workshop_utils.launchers.sagemaker.request import Submission

AS_OF = "2025"
DOLLARS_AN_HOUR = {
    "ml.m5.large": 0.115,
    "ml.m5.xlarge": 0.23,
    "ml.m5.2xlarge": 0.461,
    "ml.m5.4xlarge": 0.922,
    "ml.c5.xlarge": 0.204,
    "ml.c5.2xlarge": 0.408,
    "ml.c5.4xlarge": 0.816,
    "ml.c5.9xlarge": 1.836,
    "ml.c5.18xlarge": 3.672,
    "ml.g4dn.xlarge": 0.736,
    "ml.g5.xlarge": 1.408,
    "ml.p3.2xlarge": 3.825,
    "ml.p3.8xlarge": 14.688,
    "ml.p3.16xlarge": 28.152,
}


class NotConfirmed(ValueError):
    """Nothing was started, because no one agreed to the cost."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class Preflight:
    """What is known before the launch. `is_free` says that the account is emulated, so nothing is paid for."""

    submission: Submission
    is_free: bool = False

    def __str__(self) -> str:
        settings, count = self.submission.settings, len(self.submission.hosts)
        # The service ends the job at this limit; then the instances may be kept warm, which is paid for, too.
        seconds = self.submission.limit_seconds + settings.keep_alive_seconds
        minutes = f"{seconds / 60:g} min"
        lines = [f"{count} × {settings.instance_type} in {settings.region_name}, for at most {minutes}"]
        dollars_an_hour = DOLLARS_AN_HOUR.get(settings.instance_type)
        if dollars_an_hour is None:
            lines.append("price: not known here; see AWS's price page for SageMaker, training")
        else:
            most = count * dollars_an_hour * seconds / 3600  # at the full price, even for spot instances
            lines.append(
                f"price: {count} × {dollars_an_hour:g} $/h × {minutes} = at most "
                f"{most:.{2 if most >= 0.1 else 3}f} $ (table of {AS_OF} for us-east-1)"
            )
        if settings.spot:
            lines.append("spot: usually far less, and the instances may be taken away")
        kind = "spot training job" if settings.spot else "training job"
        lines.append(f"quota: '{settings.instance_type} for {kind} usage' must be at least {count}")
        if self.is_free:
            lines.append("the emulator of AWS has no quotas, and costs nothing")
        return "\n".join(lines)

    __repr__ = __str__


def agree(preflight: Preflight, confirmed: bool) -> None:
    """Return if the launch may go on. If it is not `confirmed` already, asks in the terminal or the notebook.

    Raises:
        NotConfirmed: if the answer is not yes, or there is no one to ask.
    """
    if confirmed:
        return
    if not ("ipykernel" in sys.modules or sys.stdin.isatty()):
        raise NotConfirmed(
            f"there is no one to ask, so nothing was started. Set confirm to true to agree to:\n{preflight}"
        )
    if input(f"{preflight}\nStart it? [y/N] ").strip().lower() not in ("y", "yes"):
        raise NotConfirmed("nothing was started")
