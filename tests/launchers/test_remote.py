"""A run that is followed from afar, over a target that answers as each test wants."""

from __future__ import annotations

import pytest

from workshop_utils.launchers.remote import RemoteRun, Unreachable
from workshop_utils.runs import RunFailed, RunState

# The thread of the run in whose clean-up an error is raised shows it, as any thread does.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

RUNNING = RunState.RUNNING, ""


class Target:
    """Answers `poll` with each of `answers` in turn, and with the last for ever; an exception in `log` is raised."""

    def __init__(self, *answers, log=(), close=None):
        self.answers, self.log, self.failure = list(answers), list(log), close
        self.stops = 0

    def poll(self):
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def read(self, receive):
        while self.log:
            line = self.log.pop(0)
            if isinstance(line, Exception):
                self.log = [line]
                raise line
            receive("worker-0", line, "stdout")

    def stop(self):
        self.stops += 1
        self.answers = [(RunState.STOPPED, "")]

    def close(self):
        if self.failure:
            raise self.failure


def follow(target):
    return RemoteRun("job", ("worker-0",), target, poll_seconds=0.01)


def test_a_log_that_cannot_be_read_does_not_change_how_the_job_ends():
    run = follow(Target(RUNNING, (RunState.SUCCEEDED, ""), log=["one", Unreachable("denied")]))
    assert run.wait(10).state is RunState.SUCCEEDED
    assert [line.text for line in run.logs()] == ["one", "the log cannot be read: denied"]


def test_a_stop_by_the_user_and_one_by_somebody_else_differ():
    run = follow(target := Target(RUNNING))
    run.stop()
    assert (run.state, target.stops) == (RunState.STOPPED, 1)
    with pytest.raises(RunFailed, match="job was stopped, but not by this run"):
        follow(Target((RunState.STOPPED, ""))).wait(10)


def test_a_job_that_ended_is_not_stopped_again_and_a_clean_up_that_fails_does_not_hide_its_end():
    target = Target((RunState.SUCCEEDED, ""), close=OSError("gone"))
    with follow(target) as run:
        assert run.wait(10).state is RunState.SUCCEEDED
    assert target.stops == 0
