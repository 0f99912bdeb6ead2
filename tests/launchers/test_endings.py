"""How a process ended, in words."""

from __future__ import annotations

import pytest

from workshop_utils.launchers import endings


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-9, "was killed by SIGKILL"),
        (-40, "was killed by signal 40"),  # a real-time signal, which has no name
    ],
)
def test_an_exit_code_is_a_code_or_the_name_of_a_signal(code: int, words: str) -> None:
    assert endings.how(code) == words
