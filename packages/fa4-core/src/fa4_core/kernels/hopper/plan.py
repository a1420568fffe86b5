"""The work list: which query tile of which kv head comes when. Made once a step from host lengths, in numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .config import GRANULE, Tile
from .ranges import key_tiles, query_span

ITEM_INTS = 8
REQUEST, HEAD, TILE, FROM, OF, PARTIAL, TO = range(7)
"""An item's fields: of a query tile's key tiles, cut in OF equal pieces, it has pieces FROM to TO - 1; PARTIAL is where
its result is left for the combine, -1 where the tile is not split. A split tile's own row has the number of its items
and its first PARTIAL in fields 3 and 4."""
TILE_OVERHEAD = 1.5  # of a work item, in key tiles: its prologue and its epilogue
PART_OVERHEAD = 4.0  # of each part of a split tile: its share of the combine
MIN_PART = 8  # key tiles of a part, at least
MAX_PARTS = 32
PARTIAL_COST = 0.03  # of each partial result on the whole, written and read again, in key tiles
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


@dataclass(frozen=True)
class Layer:
    """What lists depend on beside the step's lengths; as in Step."""

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


@dataclass(frozen=True)
class Cut:
    """How query tiles are split.

    Args:
        parts: Items of each tile, int64.
        length: Key tiles of each item but a tile's last, which has the rest; 0 cuts a tile in equal parts.
    """

    parts: np.ndarray
    length: int = 0

    def lengths(self, cost: np.ndarray) -> np.ndarray:
        """Key tiles of every item, the first items of all tiles before the last ones."""
        if not self.length:
            return np.repeat(cost / self.parts, self.parts)
        last = cost - (self.parts - 1) * self.length
        return np.concatenate([np.full(int((self.parts - 1).sum()), float(self.length)), last])


def finish(lengths: np.ndarray, blocks: int) -> float:
    """When the last block is done, items taken longest first: round by round, the longest to the least busy."""
    busy = np.zeros(blocks)
    lengths = -np.sort(-lengths)
    for i in range(0, lengths.size, blocks):
        some = lengths[i : i + blocks]
        busy.sort()
        busy[: some.size] += some
    return float(busy.max())


def choose_cut(cost: np.ndarray, heads: int, blocks: int) -> Cut:
    """The cut that finishes first; none where splitting would not be worth it.

    Equal parts are tried at each number of parts of the longest tile, and parts of the length at which every block
    has the mean load: two tiles of three blocks then become four items and not six.
    """
    whole = Cut(np.ones(cost.size, np.int64))
    if not cost.size or cost.size * heads > 4 * blocks:
        return whole

    def time(cut: Cut) -> float:
        overhead = TILE_OVERHEAD if cut is whole else PART_OVERHEAD
        partials = int(cut.parts.sum(where=cut.parts > 1)) * heads
        return finish(np.tile(cut.lengths(cost) + overhead, heads), blocks) + PARTIAL_COST * partials

    best, least = whole, 0.93 * time(whole)
    most, candidates = float(cost.max()), []
    for k in (*range(2, 13), 14, 16, 20, 24, MAX_PARTS):
        if most / k >= MIN_PART / 2:
            candidates.append(Cut(np.maximum(np.ceil(cost / max(most / k, MIN_PART)), 1).astype(np.int64)))
    for rounds in (1, 2):
        load = heads * float(cost.sum()) / (blocks * rounds)
        length = int(np.ceil(load + PART_OVERHEAD / 2))
        if MIN_PART <= length < most:
            parts = -(-cost // length)
            parts -= (parts > 1) & (cost - (parts - 1) * length < MIN_PART)  # a short rest goes to the part before it
            if parts.max() <= MAX_PARTS:
                candidates.append(Cut(np.maximum(parts, 1), length))
    for cut in candidates:
        if int(cut.parts.sum()) * heads <= 8 * blocks:
            t = time(cut)
            if t < least:
                best, least = cut, t
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
    cut = choose_cut(cost, step.kv_heads, blocks) if blocks else Cut(np.ones(cost.size, np.int64))
    parts = cut.parts

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
        rows[:, FROM:] = (0, 1, -1, 1, 0)
        return Work(rows, np.empty((0, ITEM_INTS), np.int32), 0)
    start = np.cumsum(count) - count
    pair = np.repeat(np.arange(of.size), count)
    part = np.arange(pair.size) - start[pair]
    first_partial = np.cumsum(np.where(is_split, count, 0)) - np.where(is_split, count, 0)
    rows = np.zeros((pair.size, ITEM_INTS), np.int32)
    rows[:, REQUEST], rows[:, HEAD], rows[:, TILE] = request[of[pair]], head[pair], index[of[pair]]
    rows[:, FROM], rows[:, TO], rows[:, OF] = part, part + 1, count[pair]
    if cut.length:
        whole = cost[of[pair]]
        rows[:, FROM], rows[:, OF] = part * cut.length, np.where(is_split[pair], whole, 1)
        rows[:, TO] = np.where(part + 1 < count[pair], (part + 1) * cut.length, rows[:, OF])
    rows[:, PARTIAL] = np.where(is_split[pair], first_partial[pair] + part, -1)
    if cut.length:  # the rests are shorter, and come last
        length = np.where(is_split[pair], rows[:, TO] - rows[:, FROM], cost[of[pair]])
        rows = rows[np.argsort(-length, kind="stable")]
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
