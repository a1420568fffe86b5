"""Keys in scattered slots, made into boxes: where runs are is found once a step, the rest is copied once a layer.

Boxes of all requests are numbered in one row: request i's start at first_box[i]. `owner` names each box's request.
How many there are stands on the device, so that a captured graph may be replayed after the step has changed.
"""

from __future__ import annotations

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, cute, range_constexpr

from . import ptx
from .config import BOX
from .pages import SCATTERED

THREADS = 256
AT_ONCE = 8  # chunks that a thread has under way: the copy is bound by latency otherwise


@cute.jit
def readable(mCuQ: cute.Tensor, mKvLens: cute.Tensor, request: Int32, left: Int32) -> tuple[Int32, Int32]:
    """The keys [lo, hi) that some query of the request may read."""
    q_len = mCuQ[request + 1] - mCuQ[request]
    hi = mKvLens[request] * cutlass.min(q_len, 1)  # none, where there is no query: its table entries may be anything
    return cutlass.max(0, hi - q_len - left), hi


class FindRuns:
    """first_slots[box]: the slot of the box's first key where its readable keys stand in consecutive slots, else
    SCATTERED. One thread a box."""

    @cute.jit
    def __call__(
        self,
        mTable: cute.Tensor,  # (B, P)
        mCuQ: cute.Tensor,  # (B + 1,)
        mKvLens: cute.Tensor,  # (B,)
        mOwner: cute.Tensor,  # (boxes,)
        mFirstBox: cute.Tensor,  # (B,)
        mFirstSlots: cute.Tensor,  # (boxes,) written
        mControl: cute.Tensor,  # (4,): see Forward
        page_size: Int32,
        left: Int32,
        blocks: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch."""
        self.kernel(mTable, mCuQ, mKvLens, mOwner, mFirstBox, mFirstSlots, mControl, page_size, left).launch(
            grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mTable: cute.Tensor, mCuQ: cute.Tensor, mKvLens: cute.Tensor, mOwner: cute.Tensor,
               mFirstBox: cute.Tensor, mFirstSlots: cute.Tensor, mControl: cute.Tensor, page_size: Int32,
               left: Int32) -> None:  # fmt: skip
        """A box a thread, and then the next."""
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        box = block * THREADS + tid
        while box < mControl[2]:
            request = mOwner[box]
            lo, hi = readable(mCuQ, mKvLens, request, left)
            key = BOX * (box - mFirstBox[request])
            start, run = Int32(0), Int32(1)
            for r in range_constexpr(BOX):
                if key + r >= lo and key + r < hi:
                    slot = mTable[request, (key + r) // page_size] * page_size + (key + r) % page_size
                    if key + r == cutlass.max(lo, key):
                        start = slot - r
                    if slot != start + r:
                        run = Int32(0)
            mFirstSlots[box] = start if run == 1 and start >= 0 else Int32(SCATTERED)
            box += blocks * THREADS


class Gather:
    """Copy the boxes that are no run into scratch, zeros where a row may not be read. Rows are counted in chunks of
    16 bytes, so that one variant serves every head dim and 16-bit type."""

    @cute.jit
    def __call__(
        self,
        mK: cute.Tensor,  # (pages, page_size, kv_heads, d / 8, 4) Int32
        mV: cute.Tensor,  # (pages, page_size, kv_heads, d_v / 8, 4) Int32
        mScratchK: cute.Tensor,  # (gathered * BOX, kv_heads, d / 8, 4) Int32, written
        mScratchV: cute.Tensor,  # (gathered * BOX, kv_heads, d_v / 8, 4) Int32, written
        mTable: cute.Tensor,  # (B, P)
        mCuQ: cute.Tensor,  # (B + 1,)
        mKvLens: cute.Tensor,  # (B,)
        mOwner: cute.Tensor,  # (boxes,)
        mFirstBox: cute.Tensor,  # (B,)
        mFirstSlots: cute.Tensor,  # (boxes,)
        mControl: cute.Tensor,  # (4,): see Forward
        page_size: Int32,
        left: Int32,
        flat: Int32,
        gathered: Int32,  # boxes that scratch holds
        blocks: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch."""
        self.kernel(mK, mV, mScratchK, mScratchV, mTable, mCuQ, mKvLens, mOwner, mFirstBox, mFirstSlots, mControl,
                    page_size, left, flat, gathered).launch(
            grid=(blocks, 2, 1), block=(THREADS, 1, 1), stream=stream
        )  # fmt: skip

    @cute.kernel
    def kernel(self, mK: cute.Tensor, mV: cute.Tensor, mScratchK: cute.Tensor, mScratchV: cute.Tensor,
               mTable: cute.Tensor, mCuQ: cute.Tensor, mKvLens: cute.Tensor, mOwner: cute.Tensor,
               mFirstBox: cute.Tensor, mFirstSlots: cute.Tensor, mControl: cute.Tensor, page_size: Int32, left: Int32,
               flat: Int32, gathered: Int32) -> None:  # fmt: skip
        """Boxes in turn, K and V in blocks of their own."""
        tid, _, _ = cute.arch.thread_idx()
        block, of_v, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        # Sixteen threads a row, so that a thread keeps one row of a box: one look-up, then plain strides.
        r, part = tid // BOX, tid % BOX
        box, boxes = block, cutlass.min(mControl[2], gathered)
        while box < boxes:
            if flat == 0 or mFirstSlots[box] == SCATTERED:
                request = mOwner[box]
                lo, hi = readable(mCuQ, mKvLens, request, left)
                key = BOX * (box - mFirstBox[request]) + r
                if key - r < hi and key - r + BOX > lo:
                    page, row, inside = Int32(0), Int32(0), Int32(0)
                    if key >= lo and key < hi:
                        page, row, inside = mTable[request, key // page_size], key % page_size, Int32(1)
                    here = SimpleNamespace(page=page, row=row, to=box * BOX + r, part=part, inside=inside)
                    if of_v == 0:
                        self.copy_row(mK, mScratchK, here)
                    else:
                        self.copy_row(mV, mScratchV, here)
            box += blocks

    @cute.jit
    def copy_row(self, mX, mScratch, here):
        """All heads of one row, AT_ONCE chunks at a time."""
        heads, chunks = cute.size(mX, mode=[2]), cute.size(mX, mode=[3])
        words = cute.make_rmem_tensor(4 * AT_ONCE, Int32)
        for first in cutlass.range(here.part, heads * chunks, 16 * AT_ONCE, unroll=1):
            for u in range_constexpr(AT_ONCE):
                i = first + 16 * u
                source = cute.domain_offset((here.page, here.row, i // chunks, i % chunks, 0), mX).iterator.toint()
                wanted = here.inside if i < heads * chunks else Int32(0)
                loaded = ptx.load_16_bytes_or_zeros(source, wanted)
                for w in range_constexpr(4):
                    words[4 * u + w] = loaded[w]
            for u in range_constexpr(AT_ONCE):
                i = first + 16 * u
                if i < heads * chunks:
                    to = cute.domain_offset((here.to, i // chunks, i % chunks, 0), mScratch).iterator.toint()
                    ptx.store_16_bytes(to, words[4 * u], words[4 * u + 1], words[4 * u + 2], words[4 * u + 3])
