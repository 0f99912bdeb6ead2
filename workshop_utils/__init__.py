"""The helper package of the workshop: describe a training job once, launch it anywhere, measure it.

Start reading at `jobs` (what to run), `strategies` (how workers co-operate) and `launchers.local` (a place).

    from workshop_utils import on_ranks, rank_group     # a function on real processes

In a notebook, `%load_ext workshop_utils` brings the cell magic %%ranks.
"""

import sys
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError(
        "the workshop does not run on Windows itself: use WSL2 or the container (docs/setup.md)"
    )

if TYPE_CHECKING:
    from workshop_utils.ranks import on_ranks as on_ranks
    from workshop_utils.ranks import rank_group as rank_group
    from workshop_utils.training.tcp_bytes import count_bytes as count_bytes


def __getattr__(name: str) -> Any:
    # Imported when they are asked for: a training script that imports `place` is to start in a moment.
    if name in ("on_ranks", "rank_group"):
        from workshop_utils import ranks

        return getattr(ranks, name)
    if name == "count_bytes":
        from workshop_utils.training.tcp_bytes import count_bytes

        return count_bytes
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:
    """What `%load_ext workshop_utils` does."""
    from workshop_utils.ranks import cell

    cell.register(shell)
