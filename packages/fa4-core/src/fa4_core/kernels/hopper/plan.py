"""The work list: which query tile of which kv head comes when. Made once a step from host lengths, in numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .config import GRANULE, Tile
from .ranges import key_tiles, query_span

ITEM_INTS = 4  # request, kv head, tile, split
TILE_OVERHEAD = 1.5  # of a work item, in key tiles: its prologue and its epilogue
SECTION_BYTES = 24 << 20  # of K and V that the items under way together read: well within the L2 cache of 50 to 60 MB


@dataclass(frozen=True)
class Step:
    """What the list is made from; lengths are the host's upper bounds.

    Args:
        q_lens: Query rows of each request, int64 [B].
        kv_lens: Keys of each request, int64 [B].
        kv_heads: Key heads.
        ratio: Query heads a key head.
        left: Keys before a query that it sees.
        right: Keys after it.
        row_bytes: Of one key and its value, one head.
    """

    q_lens: np.ndarray
    kv_lens: np.ndarray
    kv_heads: int
    ratio: int
    left: int
    right: int
    row_bytes: int


def query_tiles(q_lens: np.ndarray, ratio: int, tile: Tile) -> np.ndarray:
    """Query tiles of each request."""
    granules = -(-q_lens // GRANULE) * ratio
    return -(-granules // tile.granules)


def work_list(step: Step, tile: Tile) -> np.ndarray:
    """The items in the order in which blocks take them, int32 [items, ITEM_INTS].

    Longest first, so that the last to finish are short. Requests and heads whose keys fit the cache together form a
    section, and sections follow each other: the blocks at work at one time share what they read.
    """
    tiles = query_tiles(step.q_lens, step.ratio, tile)
    request = np.repeat(np.arange(tiles.size), tiles)
    index = np.arange(request.size) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    q_len, kv_len = step.q_lens[request], step.kv_lens[request]
    first, last = query_span(index, step.ratio, q_len, tile.granules, np.minimum)
    n_min, n_max, _, _ = key_tiles(first, last, q_len, kv_len, step.left, step.right, tile.n, np.minimum, np.maximum)
    cost = np.maximum(n_max - n_min, 0) + TILE_OVERHEAD

    # Sections: whole (request, head) pairs, requests with the most keys first.
    keys = np.minimum(step.kv_lens, step.q_lens + step.left)
    by_keys = np.argsort(-keys, kind="stable")
    each = np.repeat(keys[by_keys] * step.row_bytes, step.kv_heads)  # bytes of a pair
    section = np.empty((tiles.size, step.kv_heads), np.int64)
    section[by_keys] = ((np.cumsum(each) - each) // SECTION_BYTES).reshape(tiles.size, step.kv_heads)

    heads = np.arange(step.kv_heads)
    of = section[request].ravel()  # [items of a head, kv_heads]
    order = np.lexsort((np.repeat(-cost, step.kv_heads), of))
    items = np.zeros((order.size, ITEM_INTS), np.int32)
    which, head = order // step.kv_heads, heads[order % step.kv_heads]
    items[:, 0], items[:, 1], items[:, 2] = request[which], head, index[which]
    return items
