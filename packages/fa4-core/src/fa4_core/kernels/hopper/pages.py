"""How K and V reach shared memory: TMA boxes of BOX keys, issued by the lanes of one producer warp.

A tile of n keys is cut into boxes of BOX rows and, across the head, into panels of COLUMNS elements; every lane
issues boxes of its own. Whatever may not be read (keys past kv_len, or before every query's window) is asked for at
page -1, which the copy engine fills with zeros: it reads nothing there, and P * 0 stays 0 where P * NaN would not.
"""

from __future__ import annotations

from types import SimpleNamespace

from cutlass import Boolean, Int32, const_expr, cute, range_constexpr

from . import ptx
from .config import BOX, COLUMNS, Config

NOWHERE = -1  # the page that reads as zeros
SCATTERED = -(1 << 30)  # in the table of slots: the keys of this box are not in consecutive slots
ROW_BYTES = 2 * COLUMNS


class PageLoader:
    """Loads tiles of K or of V. Holds no register: what the kernel knows only when it runs is in `src`.

    `src` has: table (page_table), page_size, flat (slots are one dimension of the pool), first_slots (by box: the slot
    of its first key, or SCATTERED), gathered (so many boxes, the first, are in scratch if scattered; those past them
    are read row by row), and of the item: request, head, lo and hi (keys that may be read), box0 (its first in
    first_slots); whole, row and scratch (addresses of the tensor maps of BOX rows of the pool, of one, and of BOX rows
    of scratch).

    Args:
        config: The variant.
        d: Elements of a row.
        exact: Zero every row that may not be read; else only rows of pages that may not be read. V needs it.
    """

    def __init__(self, config: Config, d: int, exact: bool) -> None:
        self.n = config.tile.n
        self.panels = -(-d // COLUMNS)
        self.exact = exact
        self.by_slot = config.load == "slots"
        self.boxes = self.n // BOX
        self.bytes = self.n * self.panels * ROW_BYTES
        assert self.boxes * self.panels <= 32

    @cute.jit
    def find(self, src: SimpleNamespace, first_key: Int32, lane: Int32, place: cute.Tensor) -> None:
        """Look up where this lane's box of a tile lies: place = (row, page), of the scratch where page is SCATTERED."""
        key = first_key + BOX * (lane % self.boxes)
        row, page = Int32(0), Int32(NOWHERE)
        if key + BOX > src.lo and key < src.hi:
            if const_expr(self.by_slot):
                row, page = src.first_slots[src.box0 + key // BOX], Int32(0)
                if row == SCATTERED or src.flat == 0:
                    row, page = BOX * (src.box0 + key // BOX), Int32(SCATTERED)
            else:
                page = src.table[src.request, key // src.page_size]
                row = key % src.page_size
        place[0], place[1] = row, page

    @cute.jit
    def issue(self, src: SimpleNamespace, first_key: Int32, lane: Int32, place: cute.Tensor, smem: Int32,
              barrier: Int32) -> None:  # fmt: skip
        """Ask for the tile; all lanes together, after the barrier was told `bytes`."""
        box, panel = lane % self.boxes, lane // self.boxes
        key = first_key + BOX * box
        row, page = place[0], place[1]
        scattered = Boolean(False)
        if const_expr(self.by_slot):
            scattered = page == SCATTERED
        by_row = Boolean(False)
        if const_expr(self.exact):  # the gather has zeroed what lies outside
            cut = (key < src.lo and src.lo < key + BOX) or (key < src.hi and src.hi < key + BOX)
            by_row = cut and not scattered
        if const_expr(self.by_slot):
            by_row = by_row or (scattered and row >= BOX * src.gathered)
        if panel < self.panels and not by_row:
            descriptor = src.whole
            if const_expr(self.by_slot):  # noqa: SIM102 (one is settled when compiled, one when run)
                if scattered:
                    descriptor, page = src.scratch, Int32(0)
            at = smem + (panel * self.n + BOX * box) * ROW_BYTES
            ptx.tma_load_4d(at, descriptor, COLUMNS * panel, row, src.head, page, barrier)
        if const_expr(self.exact or self.by_slot):
            votes = cute.arch.vote_ballot_sync(by_row) & ((1 << self.boxes) - 1)
            if votes != 0:
                for b in range_constexpr(self.boxes):
                    if votes & (1 << b) != 0:
                        self._rows(src, first_key + BOX * b, lane, smem + BOX * b * ROW_BYTES, barrier)

    @cute.jit
    def _rows(self, src, key, lane, smem, barrier):
        """A box row by row: only some of its rows may be read, or they lie apart."""
        r = lane % BOX
        row, page = Int32(0), Int32(NOWHERE)
        if key + r >= src.lo and key + r < src.hi:
            page = src.table[src.request, (key + r) // src.page_size]
            row = (key + r) % src.page_size
            if const_expr(self.by_slot):  # noqa: SIM102
                if src.flat == 1:
                    row, page = page * src.page_size + row, Int32(0)
        for i in range_constexpr(-(-self.panels * BOX // 32)):
            panel = lane // BOX + 2 * i
            if panel < self.panels:
                to = smem + (panel * self.n + r) * ROW_BYTES
                ptx.tma_load_4d(to, src.row, COLUMNS * panel, row, src.head, page, barrier)
