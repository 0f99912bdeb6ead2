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


def test_no_more_than_the_last_lines_are_shown() -> None:
    texts = [f"line {number}" for number in range(endings.LAST_LINES + 3)]
    shown = endings.last_lines(texts).splitlines()
    assert shown == ["Its last lines:", *(f"  {text}" for text in texts[3:])]
    assert endings.last_lines([]) == "It had printed nothing."
