"""Checks of lesson 00, welcome; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from workshop_utils.lessons.checks import Wrong, exercise, questions, result_of
from workshop_utils.runs import Run, RunState

__getattr__ = questions(__name__)


@exercise
def three_workers(run: Run) -> str:
    """`run` is one of three workers that has ended well."""
    if not isinstance(run, Run):
        raise Wrong(f"this is {type(run).__name__}; hand over what `launch` returned.")
    if run.state is RunState.RUNNING:
        raise Wrong("it still runs: `run.wait()` returns when it has ended.")
    if run.state is not RunState.SUCCEEDED:
        raise Wrong(f"the run has {run.state}. {run.reason}".strip())
    if len(run.workers) != 3:
        replaced = "`job.replace(workers=...)` returns a job with another number, and leaves `job` as it is"
        raise Wrong(f"it has {len(run.workers)} workers, {', '.join(run.workers)}; {replaced}.")
    return f"{', '.join(run.workers)} trained one model in {run.seconds:.1f} s."


@exercise
def my_images(answer: Callable[[dict[str, str], int], Iterable[int]]) -> str:
    """`answer(environment, count)`: which of `count` images belong to the worker with this environment.

    Together the workers have every image, each once, and nobody has two more than another.
    """
    for workers, count in ((2, 10), (3, 10), (1, 4), (4, 2)):
        _judge_shares([_share(answer, rank, workers, count) for rank in range(workers)], count)
    return "every image belongs to one worker, and each found its own without asking anybody."


def _share(answer: Callable[..., Iterable[int]], rank: int, workers: int, count: int) -> list[int]:
    case = f"with RANK={rank}, WORLD_SIZE={workers} and {count} images"
    try:
        share = result_of(answer, {"RANK": str(rank), "WORLD_SIZE": str(workers)}, count)
    except TypeError as error:
        if "str" in str(error):
            raise Wrong(f"{case}: {error}; an environment holds text: int(...) makes a number.") from None
        raise
    if not isinstance(share, Iterable):
        raise Wrong(f"{case} it gave {share!r}; it must give the numbers of all its images, as a list.")
    indices = [int(index) for index in share]
    if outside := [index for index in indices if not 0 <= index < count]:
        raise Wrong(f"{case} it gave image {outside[0]}; the images have the numbers 0 to {count - 1}.")
    return indices


def _judge_shares(shares: list[list[int]], count: int) -> None:
    workers = len(shares)
    of = f"with {workers} worker{'s' * (workers > 1)} and {count} images"
    owners = [[str(rank) for rank, share in enumerate(shares) if index in share] for index in range(count)]
    if workers > 1 and all(len(share) == count for share in shares):
        raise Wrong(f"{of} each worker gives all images; they must differ: RANK tells who this one is.")
    for index, ranks in enumerate(owners):
        if len(ranks) > 1:
            raise Wrong(f"{of}, image {index} belongs to rank {' and rank '.join(ranks)}; one must own it.")
        if not ranks:
            raise Wrong(f"{of}, image {index} belongs to nobody; a division's remainder needs an owner, too.")
    sizes = [len(share) for share in shares]
    if max(sizes) - min(sizes) > 1 or sum(sizes) > count:
        slowest = sizes.index(max(sizes))
        raise Wrong(f"{of}, the ranks have {sizes} images; so the others wait for rank {slowest}.")
