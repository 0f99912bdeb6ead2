"""This machine: one process for each member of a job, under a supervisor that leaves nothing behind."""

from workshop_utils.launchers.local.launcher import Local, LocalRun

__all__ = ["Local", "LocalRun"]
