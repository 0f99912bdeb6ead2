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


def filled(is_full):
    """Buckets from the last parameter on, of which a new one begins where `is_full(held, next, limit)`."""

    def answer(nbytes, limit):
        found = [[]]
        for number in reversed(range(len(nbytes))):
            if found[-1] and is_full(sum(nbytes[each] for each in found[-1]), nbytes[number], limit):
                found.append([])
            found[-1].append(number)
        return found if nbytes else []

    return answer


def first_with_room(nbytes, limit):
    found = []
    for number in reversed(range(len(nbytes))):
        for bucket in found:
            if sum(nbytes[each] for each in bucket) + nbytes[number] <= limit:
                bucket.append(number)
                break
        else:
            found.append([number])
    return found


def of_numbers(*sharded, numbers=4, nbytes=4):
    return lambda parameters, workers, stage: (
        nbytes * parameters * (numbers - sharded[stage] + sharded[stage] / workers)
    )


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda nbytes, limit: [[number] for number in range(len(nbytes))], "begin with it"),
        (lambda nbytes, limit: [[number] for number in range(len(nbytes))][::-1], "as in the naive form"),
        (lambda nbytes, limit: [list(range(1, len(nbytes)))], "in one bucket, once"),
        (lambda nbytes, limit: [list(range(len(nbytes)))[::-1]] if nbytes else [], "whatever the limit"),
        (lambda nbytes, limit: [sorted(each) for each in right_buckets(nbytes, limit)], "inside of each"),
        (lambda nbytes, limit: right_buckets(nbytes, limit)[:-1], "open at the end"),
        (lambda nbytes, limit: right_buckets(nbytes, limit)[::-1], "bucket 1 is [0], and must be [2, 1]"),
        (lambda nbytes, limit: right_buckets(nbytes, 2 * limit), "bucket 1 has 30 bytes: close it before"),
        (lambda nbytes, limit: [*right_buckets(nbytes, limit), []], "bucket 2, with [], is one too many"),
        (filled(lambda held, size, limit: held > limit), "only after a parameter has taken it above"),
        (filled(lambda held, size, limit: held >= limit), "once it has reached its limit"),
        (filled(lambda held, size, limit: held + size >= limit), "two parameters of 10 bytes fit into 20"),
        (first_with_room, "only the newest one is open"),
        (lambda nbytes, limit: "01", "it must be a list of lists"),
    ],
)
def test_wrong_buckets_are_told_what_is_wrong(answer, said):
    verdict = pytorch.buckets(answer)
    assert (verdict.state, said in verdict.text) == ("wrong", True), verdict


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (of_numbers(0, 2, 3, 4, nbytes=1), "not bytes"),
        (of_numbers(0, 0, 0, 0, numbers=1), "the parameters alone"),
        (of_numbers(0, 1, 2, 3, numbers=3), "it keeps two for each"),
        (of_numbers(0, 0, 0, 0), "what no stage changes"),
        (of_numbers(4, 4, 4, 4), "only stage 3 shards everything"),
        (of_numbers(0, 1, 2, 3), "stage 1 shards both"),
        (of_numbers(0, 2, 1, 1), "one thing more"),
        (lambda parameters, workers, stage: 4 * parameters * (4, 2, 1, 0)[stage], "does not vanish"),
        (lambda parameters, workers, stage: 12 * parameters, "four numbers of 4 bytes"),
        (
            lambda parameters, workers, stage: right_bytes(parameters, workers, 0 if stage == 2 else stage),
            "stage 2 with 4 workers and 1e+06 parameters gave 1.6e+07; it must be 7e+06",
        ),
        (lambda parameters, workers, stage: parameters / (stage * 0), "ZeroDivisionError"),
    ],
)
def test_wrong_bytes_are_told_what_is_wrong(answer, said):
    verdict = pytorch.bytes_of_a_rank(answer)
    assert (verdict.state, said in verdict.text) == ("wrong", True), verdict


@pytest.mark.parametrize(
    ("check", "answer", "said"),
    [
        ("accumulated_megabytes", 2800, "no_sync is there to spare"),
        ("accumulated_megabytes", 800, "2 · 7/8 K"),
        ("accumulated_megabytes", 333, "send nothing"),
        ("fully_sharded_megabytes", 700, "fetches the parameters twice"),
        ("fully_sharded_megabytes", 50, "two all-gathers"),
        ("workers_for_a_gpu", 1, "112 GB"),
        ("workers_for_a_gpu", 1.4, "GPUs are whole"),
    ],
)
def test_a_wrong_number_is_told_where_it_comes_from(check, answer, said):
    verdict = getattr(pytorch, check)(answer)
    assert (verdict.state, said in verdict.text) == ("wrong", True), verdict
