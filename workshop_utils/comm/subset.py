"""Some of a communicator's ranks as a communicator of their own, like MPI_Comm_split."""

from __future__ import annotations

from collections.abc import Sequence

from workshop_utils.comm.communicator import Array, Communicator, Operation, inside


class Subset(Communicator):
    """`ranks` of `whole`, numbered from 0 in their order. Every one of `ranks` creates it; nothing is sent.

    `traffic` counts the messages of this subset, by its own numbers; that of `whole` counts them too. Only `whole`
    records a trace with `combine` in it, and has a say in who `may_die`; errors name ranks by the numbers of `whole`.

    Raises:
        ValueError: if this rank is not among them, or one is there twice, or is not in `whole`.
    """

    def __init__(self, whole: Communicator, ranks: Sequence[int]) -> None:
        if whole.rank not in ranks:
            raise ValueError(f"ranks is {list(ranks)}; rank {whole.rank} itself must be among them")
        if len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(whole.size)):
            right = f"it must have some of the {whole.size} ranks from 0 to {whole.size - 1}, each once"
            raise ValueError(f"ranks is {list(ranks)}; {right}")
        super().__init__(ranks.index(whole.rank), len(ranks), whole.timeout_seconds)
        self._whole, self.ranks = whole, ranks
        self._scratch, self.shares_links = whole._scratch, True

    def combine(self, accumulator: Array, incoming: Array, operation: Operation = "sum") -> None:
        with inside(self._whole, self._collective):
            self._whole.combine(accumulator, incoming, operation)

    def _exchange(self, to: int | None, outgoing: Array, source: int | None, incoming: Array) -> None:
        to_rank, source_rank = (None if peer is None else self.ranks[peer] for peer in (to, source))
        with inside(self._whole, self._collective):
            self._whole.send_recv(to_rank, outgoing, source_rank, incoming)

    def _first_of(self, sources: Sequence[int]) -> int:
        return self.ranks.index(self._whole._first_of([self.ranks[source] for source in sources]))

    def now(self) -> float:
        return self._whole.now()

    def sleep(self, seconds: float) -> None:
        self._whole.sleep(seconds)
