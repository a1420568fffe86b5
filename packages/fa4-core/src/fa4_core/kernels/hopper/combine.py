"""Splits of a row's keys, put together by their lse: the GPU's merge_states, with the layer's sink in it."""

from __future__ import annotations

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, cute, range_constexpr

from . import ptx
from .config import GRANULE

LN2 = 0.6931471805599453
LOG2E = 1.4426950408889634
WARPS = GRANULE  # a block puts together one granule, a warp one row


class Combine:
    """One variant for each value head dim and type.

    Args:
        d_v: Elements of a row.
        dtype: Of out.
    """

    def __init__(self, d_v: int, dtype: type) -> None:
        self.d_v, self.dtype = d_v, dtype
        self.quads = -(-d_v // 128)  # groups of four elements a lane

    @cute.jit
    def __call__(
        self,
        mPartO: cute.Tensor,  # (partials * m, d_v) fp32
        mPartLSE: cute.Tensor,  # (partials * m,) fp32, base 2
        mO: cute.Tensor,  # (total_q, q_heads, d_v)
        mLSE: cute.Tensor,  # (q_heads, total_q) fp32
        mSinks: cute.Tensor,  # (q_heads,) fp32
        mCuQ: cute.Tensor,  # (B + 1,)
        mWhole: cute.Tensor,  # (split tiles and more, 8): request, kv head, tile, parts, first partial
        mControl: cute.Tensor,  # (4,): see Forward
        m: Int32,
        ratio: Int32,
        want_lse: Int32,
        has_sinks: Int32,
        blocks: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch."""
        self.kernel(mPartO, mPartLSE, mO, mLSE, mSinks, mCuQ, mWhole, mControl, m, ratio, want_lse, has_sinks).launch(
            grid=(m // GRANULE, blocks, 1), block=(32 * WARPS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mPartO: cute.Tensor, mPartLSE: cute.Tensor, mO: cute.Tensor, mLSE: cute.Tensor,
               mSinks: cute.Tensor, mCuQ: cute.Tensor, mWhole: cute.Tensor, mControl: cute.Tensor, m: Int32,
               ratio: Int32, want_lse: Int32, has_sinks: Int32) -> None:  # fmt: skip
        """One granule of one tile, and then of the next."""
        granule_in_tile, tile_index, _ = cute.arch.block_idx()
        _, blocks, _ = cute.arch.grid_dim()
        warp = cute.arch.warp_idx()
        while tile_index < mControl[3]:
            request, kv_head, tile = mWhole[tile_index, 0], mWhole[tile_index, 1], mWhole[tile_index, 2]
            granule = tile * (m // GRANULE) + granule_in_tile
            query, head = GRANULE * (granule // ratio) + warp, kv_head * ratio + granule % ratio
            row0 = mCuQ[request]
            if query < mCuQ[request + 1] - row0:
                here = SimpleNamespace(
                    row=mWhole[tile_index, 4] * m + GRANULE * granule_in_tile + warp, parts=mWhole[tile_index, 3], m=m,
                    head=head, to=row0 + query, want_lse=want_lse, has_sinks=has_sinks,
                )  # fmt: skip
                self.row(mPartO, mPartLSE, mO, mLSE, mSinks, here)
            tile_index += blocks

    @cute.jit
    def row(self, mPartO, mPartLSE, mO, mLSE, mSinks, here):
        """One row of one head. Each lane holds the weight of one part; values of four parts are under way at once."""
        lane = cute.arch.lane_idx()
        mine = -Float32.inf
        if lane < here.parts:
            mine = mPartLSE[here.row + lane * here.m]
        top = mine
        for step in (1, 2, 4, 8, 16):
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=step))
        sink = -Float32.inf
        if here.has_sinks == 1:
            sink = mSinks[here.head] * LOG2E
            top = cute.arch.fmax(top, sink)
        base = Float32(0.0) if top == -Float32.inf else top
        mine = ptx.exp2(mine - base)
        total = ptx.exp2(sink - base)
        sums = cute.make_rmem_tensor(4 * self.quads, Float32)
        values = cute.make_rmem_tensor(4 * 4 * self.quads, Float32)
        weights = cute.make_rmem_tensor(4, Float32)
        for i in range_constexpr(4 * self.quads):
            sums[i] = Float32(0.0)
        for p in cutlass.range(0, here.parts, 4, unroll=1):
            for u in range_constexpr(4):
                weights[u] = cute.arch.shuffle_sync(mine, offset=p + u)  # 0 past the last part
                for i in range_constexpr(self.quads):
                    at = 128 * i + 4 * lane
                    # A part that adds nothing is not looked at: it may hold an infinity.
                    wanted = Int32(1) if weights[u] != 0.0 and at < self.d_v else Int32(0)
                    source = cute.domain_offset((here.row + (p + u) * here.m, at), mPartO).iterator.toint()
                    found = ptx.load_4_floats_or_zeros(source, wanted)
                    for e in range_constexpr(4):
                        values[4 * (self.quads * u + i) + e] = found[e]
            for u in range_constexpr(4):
                total = total + weights[u]
                for i in range_constexpr(4 * self.quads):
                    sums[i] = sums[i] + weights[u] * values[4 * self.quads * u + i]
        empty = total == 0.0
        factor = Float32(0.0) if empty else Float32(1.0) / total
        for i in range_constexpr(self.quads):
            at = 128 * i + 4 * lane
            if at < self.d_v:
                low = ptx.pack_half2(sums[4 * i] * factor, sums[4 * i + 1] * factor, self.dtype)
                high = ptx.pack_half2(sums[4 * i + 2] * factor, sums[4 * i + 3] * factor, self.dtype)
                ptx.store_8_bytes(cute.domain_offset((here.to, here.head, at), mO).iterator.toint(), low, high)
        if here.want_lse == 1 and lane == 0:
            mLSE[here.head, here.to] = -Float32.inf if empty else (base + ptx.log2(total)) * LN2
