"""Before anything is paid for: what a launch may cost at most, which quota it needs, and whether to go on."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from workshop_utils.launchers.sagemaker import prices
from workshop_utils.launchers.sagemaker.request import Plan


class NotConfirmed(ValueError):
    """Nothing was started, since nobody has agreed to the cost."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class Preflight:
    """What is known of `plan` before its launch. `is_free` says that nothing is paid for at all."""

    plan: Plan
    is_free: bool = False

    def __str__(self) -> str:
        settings, count = self.plan.settings, len(self.plan.hosts)
        # After how long the service ends the job at the latest, with the time for which it is kept warm.
        seconds = self.plan.limit_seconds + settings.keep_alive_seconds
        minutes = f"{seconds / 60:g} min"
        lines = [f"{count} × {settings.instance_type} in {settings.region_name}, for at most {minutes}"]
        dollars_an_hour = prices.DOLLARS_AN_HOUR.get(settings.instance_type)
        if dollars_an_hour is None:
            lines.append("price: not known here; see AWS's price page for SageMaker, training")
        else:
            most = count * dollars_an_hour * seconds / 3600  # spot is not counted
            lines.append(
                f"price: {count} × {dollars_an_hour:g} $/h × {minutes} = at most "
                f"{most:.{2 if most >= 0.1 else 3}f} $ (table of {prices.AS_OF} for us-east-1)"
            )
        if settings.spot:
            lines.append("spot: usually far less, and the instances may be taken away")
        kind = "spot training job" if settings.spot else "training job"
        lines.append(f"quota: '{settings.instance_type} for {kind} usage' must be at least {count}")
        if self.is_free:
            lines.append("the stand-in has no quotas, and costs nothing")
        return "\n".join(lines)

    __repr__ = __str__


def agree(preflight: Preflight, confirmed: bool) -> None:
    """Return if the launch may go on: it is confirmed already, or the terminal or the notebook is asked.

    Raises:
        NotConfirmed: if the answer is not yes, or there is nobody to ask.
    """
    if confirmed:
        return
    if not ("ipykernel" in sys.modules or sys.stdin.isatty()):
        raise NotConfirmed(
            f"nobody is here to be asked, so nothing was started. Set confirm to true to agree to:\n{preflight}"
        )
    if input(f"{preflight}\nStart it? [y/N] ").strip().lower() not in ("y", "yes"):
        raise NotConfirmed("nothing was started")
