"""How K and V reach shared memory: TMA boxes through the page table, issued by the lanes of one producer warp.

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
ROW_BYTES = 2 * COLUMNS
KEYS_A_LANE = 4  # of "rows"; a box is a group of four lanes


class PageLoader:
    """Loads tiles of K or of V. Holds no register: what the kernel knows only when it runs is in `src`.

    `src` has: table (page_table), page_size, flat (rows of the whole pool are one dimension), box and row (addresses
    of the tensor maps of BOX rows and of one), head.

    Args:
        config: The variant.
        d: Elements of a row.
        exact: Zero every row that may not be read; else only rows of pages that may not be read. V needs it.
    """

    def __init__(self, config: Config, d: int, exact: bool) -> None:
        self.n = config.tile.n
        self.panels = -(-d // COLUMNS)
        self.exact = exact
        self.by_row = config.load == "rows"
        self.boxes = self.n // BOX
        self.bytes = self.n * self.panels * ROW_BYTES
        assert self.boxes * self.panels <= 32
        assert self.n <= 32 * KEYS_A_LANE
        assert self.panels <= BOX // KEYS_A_LANE

    @cute.jit
    def find(self, src: SimpleNamespace, request: Int32, first_key: Int32, lo: Int32, hi: Int32, lane: Int32,
             places: cute.Tensor) -> None:  # fmt: skip
        """Look up where this lane's share of a tile lies: (row, page) of each of its keys or of its one box."""
        if const_expr(self.by_row):
            for i in range_constexpr(KEYS_A_LANE):
                self._find_key(src, request, first_key + KEYS_A_LANE * lane + i, lo, hi, places, i)
        else:
            key = first_key + BOX * (lane % self.boxes)
            page, row = Int32(NOWHERE), Int32(0)
            if key + BOX > lo and key < hi:
                page = src.table[request, key // src.page_size]
                row = key % src.page_size
            places[0], places[1] = row, page

    @cute.jit
    def _find_key(self, src, request, key, lo, hi, places, i):
        page, row = Int32(NOWHERE), Int32(0)
        if key >= lo and key < hi:
            page = src.table[request, key // src.page_size]
            row = key % src.page_size
            if src.flat == 1:
                row, page = page * src.page_size + row, Int32(0)
        places[2 * i], places[2 * i + 1] = row, page

    @cute.jit
    def issue(self, src: SimpleNamespace, request: Int32, first_key: Int32, lo: Int32, hi: Int32, lane: Int32,
              places: cute.Tensor, smem: Int32, barrier: Int32) -> None:  # fmt: skip
        """Ask for the tile; all lanes together, after the barrier was told `bytes`."""
        if const_expr(self.by_row):
            self._issue_runs(src, lane, places, smem, barrier)
        else:
            self._issue_boxes(src, request, first_key, lo, hi, lane, places, smem, barrier)

    @cute.jit
    def _issue_boxes(self, src, request, first_key, lo, hi, lane, places, smem, barrier):
        box, panel = lane % self.boxes, lane // self.boxes
        key = first_key + BOX * box
        whole = Boolean(True)
        if const_expr(self.exact):
            # A box with rows of both kinds goes row by row below.
            cut_lo = key < lo and lo < key + BOX
            cut_hi = key < hi and hi < key + BOX
            whole = not (cut_lo or cut_hi)
        if panel < self.panels and whole:
            at = smem + (panel * self.n + BOX * box) * ROW_BYTES
            ptx.tma_load_4d(at, src.box, COLUMNS * panel, places[0], src.head, places[1], barrier)
        if const_expr(self.exact):
            if lo > first_key or hi < first_key + self.n:
                lo_box, hi_box = lo - lo % BOX, hi - hi % BOX
                self._issue_cut(src, request, first_key, lo, hi, lo_box, lo % BOX != 0, lane, smem, barrier)
                other = hi % BOX != 0 and (hi_box != lo_box or lo % BOX == 0)
                self._issue_cut(src, request, first_key, lo, hi, hi_box, other, lane, smem, barrier)

    @cute.jit
    def _issue_cut(self, src, request, first_key, lo, hi, key, wanted, lane, smem, barrier):
        """A box of which only some rows may be read."""
        if wanted and key >= first_key and key < first_key + self.n:
            page, row = Int32(NOWHERE), key % src.page_size
            if key + BOX > lo and key < hi:
                page = src.table[request, key // src.page_size]
            at = smem + (key - first_key) * ROW_BYTES
            r = lane % BOX
            inside = key + r >= lo and key + r < hi
            mine = page if inside else Int32(NOWHERE)
            for i in range_constexpr(-(-self.panels * BOX // 32)):
                panel = lane // BOX + 2 * i
                if panel < self.panels:
                    to = at + (panel * self.n + r) * ROW_BYTES
                    ptx.tma_load_4d(to, src.row, COLUMNS * panel, row + r, src.head, mine, barrier)

    @cute.jit
    def _issue_runs(self, src, lane, places, smem, barrier):
        first_row, first_page = places[0], places[1]
        next_row = cute.arch.shuffle_sync_down(first_row, offset=1)
        next_page = cute.arch.shuffle_sync_down(first_page, offset=1)
        follows = Boolean(True)
        for i in range_constexpr(KEYS_A_LANE):
            row, page = places[2 * i], places[2 * i + 1]
            row2 = places[2 * i + 2] if const_expr(i + 1 < KEYS_A_LANE) else next_row
            page2 = places[2 * i + 3] if const_expr(i + 1 < KEYS_A_LANE) else next_page
            ok = page == page2 and (page == NOWHERE or row2 == row + 1)
            if const_expr(i + 1 == KEYS_A_LANE):
                ok = ok or lane % 4 == 3
            follows = follows and ok
        votes = cute.arch.vote_ballot_sync(follows)
        run = ((votes >> (lane - lane % 4)) & 15) == 15
        box_row = cute.arch.shuffle_sync(first_row, offset=lane - lane % 4)
        box_page = cute.arch.shuffle_sync(first_page, offset=lane - lane % 4)
        if lane < self.n // KEYS_A_LANE:
            if run:
                panel = lane % 4
                if panel < self.panels:
                    at = smem + (panel * self.n + BOX * (lane // 4)) * ROW_BYTES
                    ptx.tma_load_4d(at, src.box, COLUMNS * panel, box_row, src.head, box_page, barrier)
            else:
                for i in range_constexpr(KEYS_A_LANE):
                    for panel in range_constexpr(self.panels):
                        at = smem + (panel * self.n + KEYS_A_LANE * lane + i) * ROW_BYTES
                        ptx.tma_load_4d(
                            at, src.row, COLUMNS * panel, places[2 * i], src.head, places[2 * i + 1], barrier
                        )
