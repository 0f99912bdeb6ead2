"""The checks of lesson 07 accept what is right and say what is wrong."""

import pytest

from workshop_utils.exercises import pytorch

NUMBERS = {"accumulated_megabytes": 700, "fully_sharded_megabytes": 1050, "workers_for_a_gpu": 2}


def right_buckets(nbytes, limit):
    found, room = [], 0
    for number in reversed(range(len(nbytes))):
        if not found or nbytes[number] > room:
            found.append([])
            room = limit
        found[-1].append(number)
        room -= nbytes[number]
    return found


def right_bytes(parameters, workers, stage):
    sharded = (0, 8, 12, 16)[stage]
    return parameters * (16 - sharded + sharded / workers)


def test_right_answers_are_right():
    assert pytorch.buckets(right_buckets).state == "right"
    assert pytorch.bytes_of_a_rank(right_bytes).state == "right"
    for name, value in NUMBERS.items():
        assert getattr(pytorch, name)(value).state == "right"


def test_what_is_not_written_is_not_yet_an_answer():
    assert pytorch.buckets(lambda *_: ...).state == "not yet"
    assert pytorch.bytes_of_a_rank(lambda *_: ...).state == "not yet"
    for name in NUMBERS:
        assert getattr(pytorch, name)(...).state == "not yet"


@pytest.mark.parametrize(
    ("check", "answer", "said"),
    [
        ("buckets", lambda nbytes, limit: [[number] for number in range(len(nbytes))], "begin with it"),
        ("buckets", lambda nbytes, limit: [list(range(1, len(nbytes)))], "in one bucket, once"),
        ("buckets", lambda nbytes, limit: [list(range(len(nbytes)))[::-1]], "before it would pass the limit"),
        ("bytes_of_a_rank", lambda parameters, workers, stage: 12 * parameters, "four numbers of 4 bytes"),
        ("bytes_of_a_rank", lambda parameters, workers, stage: 16 * parameters, "shards Adam's two numbers"),
        ("accumulated_megabytes", 2800, "send nothing"),
        ("fully_sharded_megabytes", 700, "two all-gathers"),
        ("workers_for_a_gpu", 1, "112 GB"),
    ],
)
def test_a_wrong_answer_is_told_what_is_wrong(check, answer, said):
    verdict = getattr(pytorch, check)(answer)
    assert verdict.state == "wrong"
    assert said in verdict.text
