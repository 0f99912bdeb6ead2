"""Before anything is paid for: what a launch costs at its time limit, which quota it needs, and whether to go on.

The prices are those of `prices.yaml`, which says where they are from.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import yaml

from workshop_utils.jobs import PlainError
from workshop_utils.launchers.sagemaker.submission import Submission

AS_OF = "2025"
# A container that is told to end has two minutes, and the toolkit takes them. Source: AWS, "StoppingCondition".
GOODBYE_MINUTES = 2
DOLLARS_AN_HOUR: dict[str, float] = yaml.safe_load(Path(__file__).with_name("prices.yaml").read_text("utf-8"))


class NotConfirmed(PlainError, ValueError):
    """Nothing was started, because no one agreed to the cost."""


def preflight(submission: Submission) -> str:
    """What a launch costs at its limit, and the quota that it needs, in lines for people."""
    settings, count = submission.settings, len(submission.hosts)
    minutes = submission.limit_seconds / 60
    lines = [f"{count} × {settings.instance_type} in {settings.region_name}, with a limit of {minutes:g} min"]
    dollars_an_hour = DOLLARS_AN_HOUR.get(settings.instance_type)
    if dollars_an_hour is None:
        lines.append("price: not known here; see AWS's price page for SageMaker, training")
    else:
        # At the full price, even for spot instances; in whole cents, never too few. Not all: AWS does not say whether
        # the time for the image and the data counts for the limit, and it is paid for.
        cents = math.ceil(100 * count * dollars_an_hour * (minutes + GOODBYE_MINUTES) / 60)
        elsewhere = "" if settings.region_name == "us-east-1" else "; other regions cost up to a third more"
        lines.append(
            f"price at the limit: {count} × {dollars_an_hour:g} $/h × ({minutes:g} + {GOODBYE_MINUTES}) min = "
            f"{cents / 100:.2f} $, and storage (table of {AS_OF} for us-east-1{elsewhere})"
        )
    if settings.spot:
        lines.append("spot: usually far less, and the instances may be taken away")
    kind = "spot training job" if settings.spot else "training job"
    lines.append(f"quota: '{settings.instance_type} for {kind} usage' must be at least {count}")
    return "\n".join(lines)


def ask(question: str) -> None:
    """Return if the answer to `question`, in the terminal or the notebook, is yes.

    Raises:
        NotConfirmed: if it is not, or there is no one to ask.
    """
    if not ("ipykernel" in sys.modules or sys.stdin.isatty()):
        advice = f"Set confirm to true to agree to:\n{question}"
        raise NotConfirmed(f"there is no one to ask, so nothing was started. {advice}")
    if input(f"{question}\nStart it? [y/N] ").strip().lower() not in ("y", "yes"):
        raise NotConfirmed("nothing was started")
