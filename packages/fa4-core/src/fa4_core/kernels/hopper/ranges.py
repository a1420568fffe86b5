"""The arithmetic of tiles: which queries a work item has and which key tiles they see.

Written once for numpy, for plain ints and for the kernel's registers: minimum and maximum are passed in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .config import GRANULE

UNBOUNDED = 1 << 29  # a window's side that hides nothing, small enough that adding a position does not overflow

Fold = Callable[[Any, Any], Any]


def window_sides(window: tuple[int | None, int | None]) -> tuple[int, int]:
    """(left, right) as numbers."""
    left, right = window
    return (
        UNBOUNDED if left is None else min(left, UNBOUNDED),
        UNBOUNDED if right is None else min(right, UNBOUNDED),
    )


def query_span(tile: Any, ratio: Any, q_len: Any, granules: int, minimum: Fold) -> tuple[Any, Any]:
    """First and last query of a tile of packed granules; last < first where it has none."""
    first = GRANULE * (tile * granules // ratio)
    last = minimum(GRANULE * ((tile * granules + granules - 1) // ratio) + GRANULE, q_len) - 1
    return first, last


def key_tiles(
    first: Any, last: Any, q_len: Any, kv_len: Any, left: Any, right: Any, n: int, minimum: Fold, maximum: Fold
) -> tuple[Any, Any, Any, Any]:
    """(n_min, n_max, clear_lo, clear_hi) of queries first..last.

    Tiles n_min..n_max - 1 hold every key that any of them sees (n_max <= n_min where none does, or one tile that is
    masked whole); every one of them sees tiles clear_lo..clear_hi - 1 whole.
    """
    shift = kv_len - q_len  # position of query 0
    stop = maximum(minimum(kv_len, shift + last + right + 1), 0)
    start = maximum(shift + first - left, 0)
    n_min, n_max = start // n, (stop + n - 1) // n
    clear_hi = maximum(minimum(kv_len, shift + first + right + 1), 0) // n
    clear_lo = (maximum(shift + last - left, 0) + n - 1) // n
    return n_min, n_max, clear_lo, clear_hi
