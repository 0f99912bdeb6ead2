"""Some of a communicator's ranks as a communicator of their own, like MPI_Comm_split."""

from __future__ import annotations

from collections.abc import Sequence

from workshop_utils.comm.communicator import Array, Communicator, Event, Operation, Traffic


class Subset(Communicator):
    """`ranks` of `whole`, numbered from 0 in their order; messages, counters and clock are those of `whole`.

    Every one of `ranks` makes it for itself; nothing is sent.

    Raises:
        ValueError: if this rank is not among them.
    """

    def __init__(self, whole: Communicator, ranks: Sequence[int]) -> None:
        if whole.rank not in ranks:
            raise ValueError(f"ranks is {list(ranks)}; rank {whole.rank} itself must be among them")
        self._whole, self._ranks = whole, ranks
        self.rank, self.size = ranks.index(whole.rank), len(ranks)
        self.timeout_seconds = whole.timeout_seconds

    @property
    def collective(self) -> str:
        """The outermost collective that runs now, of the whole communicator."""
        return self._whole.collective

    @collective.setter
    def collective(self, name: str) -> None:
        self._whole.collective = name

    @property
    def traffic(self) -> Traffic:  # type: ignore[override]
        """The whole communicator's, by its own numbering of peers."""
        return self._whole.traffic

    @property
    def trace(self) -> list[Event] | None:  # type: ignore[override]
        """The whole communicator's, by its own numbering of peers."""
        return self._whole.trace

    def now(self) -> float:
        return self._whole.now()

    def close(self) -> None:
        """Nothing to let go of: the links are the whole communicator's."""

    def wait_any(self, sources: Sequence[int]) -> int:
        return self._ranks.index(self._whole.wait_any([self._ranks[source] for source in sources]))

    def combine(self, accumulator: Array, incoming: Array, operation: Operation = "sum") -> None:
        self._whole.combine(accumulator, incoming, operation)

    def scratch(self, like: Array, purpose: str = "incoming") -> Array:
        return self._whole.scratch(like, purpose)

    def _transfer(self, to: int | None, outgoing: Array, source: int | None, incoming: Array) -> None:
        self._whole.send_recv(self._translated(to), outgoing, self._translated(source), incoming)

    _exchange = _transfer

    def _translated(self, rank: int | None) -> int | None:
        return None if rank is None else self._ranks[rank]
