"""Ranks in three directions at once: data × tensor × pipeline.

    mesh = Mesh(communicator, data=2, tensor=2, pipeline=2)        # 8 ranks
    mesh.tensor, mesh.data, mesh.pipeline                          # this rank's group in each direction

Neighbours in number are neighbours in the direction that talks most: ranks of one tensor group are next to each other,
so that they are on one machine; ranks of one pipeline are farthest apart (Narayanan et al. 2021, "Efficient Large-Scale
Language Model Training on GPU Clusters Using Megatron-LM", section 3).
"""

from __future__ import annotations

from typing import NamedTuple

from workshop_utils.comm.communicator import Communicator
from workshop_utils.comm.subset import Subset


class Place(NamedTuple):
    """Where a rank is: its number in each of its three groups."""

    data: int
    tensor: int
    pipeline: int


def place_of(rank: int, sizes: Place) -> Place:
    """Where `rank` is in a mesh of these `sizes`: (pipeline · D + data) · T + tensor is its number."""
    rest, tensor = divmod(rank, sizes.tensor)
    pipeline, data = divmod(rest, sizes.data)
    return Place(data, tensor, pipeline)


def rank_of(place: Place, sizes: Place) -> int:
    """The number of the rank at `place`."""
    return (place.pipeline * sizes.data + place.data) * sizes.tensor + place.tensor


def check(sizes: Place, ranks: int) -> None:
    """Whether a mesh of these `sizes` has as many places as there are `ranks`.

    Raises:
        ValueError: if it has not.
    """
    data, tensor, pipeline = sizes
    if min(sizes) < 1 or data * tensor * pipeline != ranks:
        raise ValueError(
            f"data × tensor × pipeline is {data} × {tensor} × {pipeline}; it must make {ranks}, the number of workers"
        )


class Mesh:
    """This rank's place, and the groups of ranks that differ from it in one direction only.

    Args:
        communicator: all ranks.
        data, tensor, pipeline: how many ranks there are in each direction.

    Raises:
        ValueError: if their product is not the number of ranks.
    """

    def __init__(self, communicator: Communicator, data: int = 1, tensor: int = 1, pipeline: int = 1) -> None:
        sizes = Place(data, tensor, pipeline)
        check(sizes, communicator.size)
        self.sizes, self.place = sizes, place_of(communicator.rank, sizes)
        self._whole = communicator
        self.data, self.tensor, self.pipeline = (
            Subset(
                communicator,
                [
                    rank_of(self.place._replace(**{direction: index}), sizes)
                    for index in range(getattr(sizes, direction))
                ],
            )
            for direction in Place._fields
        )

    def bytes_sent(self) -> dict[str, int]:
        """Bytes that this rank has sent to ranks of its data, tensor and pipeline groups, by the group's name."""
        sent = self._whole.traffic.bytes_sent
        return {
            direction: sum(
                int(sent[rank_of(self.place._replace(**{direction: index}), self.sizes)])
                for index in range(getattr(self.sizes, direction))
                if index != getattr(self.place, direction)
            )
            for direction in Place._fields
        }
