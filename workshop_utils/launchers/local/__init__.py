"""This machine: one process for each member of a job, under a supervisor that leaves nothing behind."""

from workshop_utils.launchers.local.launcher import Local
from workshop_utils.launchers.local.run import ProcessRun

__all__ = ["Local", "ProcessRun"]
