"""The work list: which query tile of which kv head comes when. Made once a step from host lengths, in numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .config import GRANULE, Tile
from .ranges import key_tiles, query_span

ITEM_INTS = 8
REQUEST, HEAD, TILE, PART, PARTS, PARTIAL = range(6)
"""An item's fields: part PART of PARTS of the keys of a query tile; PARTIAL is where the part's result is left for the
combine, -1 where the tile is not split. A split tile's own row has PARTS and its first PARTIAL in fields 3 and 4."""
TILE_OVERHEAD = 1.5  # of a work item, in key tiles: its prologue and its epilogue
PART_OVERHEAD = 4.0  # of each part of a split tile: its share of the combine
MIN_PART = 8  # key tiles of a part, at least
MAX_PARTS = 32
SECTION_BYTES = 80 << 20  # of K and V that the items under way together read; more than the L2 cache, and measured


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


@dataclass(frozen=True)
class Work:
    """What the device gets.

    Args:
        items: int32 [n, ITEM_INTS], in the order in which blocks take them.
        split: int32 [split tiles, ITEM_INTS]: request, kv head, tile, parts, first partial.
        partials: Results that the parts leave.
    """

    items: np.ndarray
    split: np.ndarray
    partials: int

    @property
    def num_splits(self) -> int:
        """The most parts of any tile."""
        return int(self.split[:, 3].max(initial=1))


def choose_parts(cost: np.ndarray, heads: int, blocks: int) -> np.ndarray:
    """Parts of each query tile, int64; all 1 where splitting would not finish sooner.

    The finish is estimated: all blocks busy with the mean load, and then the longest item; with few items, as many
    rounds of the longest. A limit on an item's key tiles is tried at each number of rounds' worth.
    """
    ones = np.ones(cost.size, np.int64)
    if not cost.size or cost.size * heads > 4 * blocks:
        return ones

    def finish(parts: np.ndarray) -> float:
        longest = float((cost / parts + np.where(parts > 1, PART_OVERHEAD, TILE_OVERHEAD)).max())
        items = int(parts.sum()) * heads
        load = heads * float((cost + parts * TILE_OVERHEAD).sum()) / blocks
        return longest * -(-items // blocks) if items <= 4 * blocks else max(load + longest / 2, longest)

    best, least = ones, 0.93 * finish(ones)
    most = float(cost.max())
    for k in range(2, MAX_PARTS + 1):
        limit = max(most / k, MIN_PART)
        parts = np.maximum(np.ceil(cost / limit), 1).astype(np.int64)
        time = finish(parts)
        if time < least:
            best, least = parts, time
    return best


def last_round(cost: np.ndarray, blocks: int) -> tuple[int, int]:
    """(items at the list's end to split, parts of each), so that the last round of many equal items fills all blocks.

    (0, 1) where it would not pay: a causal list ends in short items, and needs none of this.
    """
    some = cost.size % blocks
    if not some or cost.size < blocks:
        return 0, 1
    long = float(cost[cost.size - some :].mean())
    best, parts = long + TILE_OVERHEAD, 1
    for n in range(2, 9):
        if long / n >= MIN_PART:
            time = -(-some * n // blocks) * (long / n + PART_OVERHEAD)
            if time < best:
                best, parts = time, n
    if long + TILE_OVERHEAD - best < 0.01 * float((cost + TILE_OVERHEAD).sum()) / blocks:
        return 0, 1
    return some, parts


def work_list(step: Step, tile: Tile, blocks: int = 0) -> Work:
    """The items, longest first, so that the last to finish are short; split where blocks is given and it helps.

    Requests and heads whose keys fit the cache together form a section, and sections follow each other: the blocks
    at work at one time share what they read.
    """
    tiles = query_tiles(step.q_lens, step.ratio, tile)
    request = np.repeat(np.arange(tiles.size), tiles)
    index = np.arange(request.size) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    q_len, kv_len = step.q_lens[request], step.kv_lens[request]
    first, last = query_span(index, step.ratio, q_len, tile.granules, np.minimum)
    n_min, n_max, _, _ = key_tiles(first, last, q_len, kv_len, step.left, step.right, tile.n, np.minimum, np.maximum)
    cost = np.maximum(n_max - n_min, 0)
    parts = choose_parts(cost, step.kv_heads, blocks) if blocks else np.ones(cost.size, np.int64)

    # Every (tile, head), longest first; then by section, a stable sort of small numbers.
    by_cost = np.argsort(-(cost / parts), kind="stable")
    of = np.repeat(by_cost, step.kv_heads)
    head = np.arange(of.size) % step.kv_heads
    section = sections(step)
    if section.max(initial=0) > 0:
        order = np.argsort(section[request[of], head], kind="stable")
        of, head = of[order], head[order]
    count = parts[of]
    if blocks and of.size and (parts == 1).all():
        some, n = last_round(cost[of], blocks)
        count[of.size - some :] = n

    # Each as many times as it has parts.
    is_split = count > 1
    if not is_split.any():
        rows = np.empty((of.size, ITEM_INTS), np.int32)
        rows[:, REQUEST], rows[:, HEAD], rows[:, TILE] = request[of], head, index[of]
        rows[:, PART:] = (0, 1, -1, 0, 0)
        return Work(rows, np.empty((0, ITEM_INTS), np.int32), 0)
    start = np.cumsum(count) - count
    pair = np.repeat(np.arange(of.size), count)
    part = np.arange(pair.size) - start[pair]
    first_partial = np.cumsum(np.where(is_split, count, 0)) - np.where(is_split, count, 0)
    rows = np.zeros((pair.size, ITEM_INTS), np.int32)
    rows[:, REQUEST], rows[:, HEAD], rows[:, TILE] = request[of[pair]], head[pair], index[of[pair]]
    rows[:, PART], rows[:, PARTS] = part, count[pair]
    rows[:, PARTIAL] = np.where(is_split[pair], first_partial[pair] + part, -1)
    chosen = np.flatnonzero(is_split)
    split = np.zeros((chosen.size, ITEM_INTS), np.int32)
    split[:, 0], split[:, 1], split[:, 2] = request[of[chosen]], head[chosen], index[of[chosen]]
    split[:, 3], split[:, 4] = count[chosen], first_partial[chosen]
    return Work(rows, split, int(count[chosen].sum()))


def sections(step: Step) -> np.ndarray:
    """The section of each (request, head) pair, int16 [requests, kv_heads]; requests with the most keys first."""
    keys = np.minimum(step.kv_lens, step.q_lens + step.left)
    by_keys = np.argsort(-keys, kind="stable")
    each = np.repeat(keys[by_keys] * step.row_bytes, step.kv_heads)
    found = np.empty((keys.size, step.kv_heads), np.int16)
    found[by_keys] = np.minimum((np.cumsum(each) - each) // SECTION_BYTES, 32767).reshape(keys.size, step.kv_heads)
    return found


def box_table(kv_lens: np.ndarray, box: int) -> tuple[np.ndarray, np.ndarray]:
    """(owner of each box, first box of each request), int32; boxes of all requests numbered in one row."""
    boxes = -(-kv_lens // box)
    owner = np.repeat(np.arange(boxes.size), boxes).astype(np.int32)
    return owner, (np.cumsum(boxes) - boxes).astype(np.int32)
