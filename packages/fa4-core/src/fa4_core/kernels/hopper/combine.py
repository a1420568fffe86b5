"""Splits of a row's keys, put together by their lse: the GPU's merge_states, with the layer's sink in it."""

from __future__ import annotations

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
        self.pairs = -(-d_v // 64)  # pairs of elements a lane

    @cute.jit
    def __call__(
        self,
        mPartO: cute.Tensor,  # (partials * m, d_v) fp32
        mPartLSE: cute.Tensor,  # (partials * m,) fp32, base 2
        mO: cute.Tensor,  # (total_q, q_heads, d_v)
        mLSE: cute.Tensor,  # (q_heads, total_q) fp32
        mSinks: cute.Tensor,  # (q_heads,) fp32
        mCuQ: cute.Tensor,  # (B + 1,)
        mWhole: cute.Tensor,  # (split tiles, 8): request, kv head, tile, parts, first partial
        m: Int32,
        ratio: Int32,
        want_lse: Int32,
        has_sinks: Int32,
        blocks: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch."""
        self.kernel(mPartO, mPartLSE, mO, mLSE, mSinks, mCuQ, mWhole, m, ratio, want_lse, has_sinks).launch(
            grid=(m // GRANULE, blocks, 1), block=(32 * WARPS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mPartO: cute.Tensor, mPartLSE: cute.Tensor, mO: cute.Tensor, mLSE: cute.Tensor,
               mSinks: cute.Tensor, mCuQ: cute.Tensor, mWhole: cute.Tensor, m: Int32, ratio: Int32, want_lse: Int32,
               has_sinks: Int32) -> None:  # fmt: skip
        """One granule of one tile."""
        granule_in_tile, tile_index, _ = cute.arch.block_idx()
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        request, kv_head, tile = mWhole[tile_index, 0], mWhole[tile_index, 1], mWhole[tile_index, 2]
        parts, first = mWhole[tile_index, 3], mWhole[tile_index, 4]
        granule = tile * (m // GRANULE) + granule_in_tile
        query, head = GRANULE * (granule // ratio) + warp, kv_head * ratio + granule % ratio
        row0 = mCuQ[request]
        if query < mCuQ[request + 1] - row0:
            row = first * m + GRANULE * granule_in_tile + warp
            top = -Float32.inf
            for p in cutlass.range(parts, unroll=1):
                top = cute.arch.fmax(top, mPartLSE[row + p * m])
            sink = -Float32.inf
            if has_sinks == 1:
                sink = mSinks[head] * LOG2E
                top = cute.arch.fmax(top, sink)
            base = Float32(0.0) if top == -Float32.inf else top
            total = ptx.exp2(sink - base)
            sums = cute.make_rmem_tensor(2 * self.pairs, Float32)
            for i in range_constexpr(2 * self.pairs):
                sums[i] = Float32(0.0)
            for p in cutlass.range(parts, unroll=1):
                weight = ptx.exp2(mPartLSE[row + p * m] - base)
                total = total + weight
                for i in range_constexpr(self.pairs):
                    at = 64 * i + 2 * lane
                    if at < self.d_v:
                        sums[2 * i] = sums[2 * i] + weight * mPartO[row + p * m, at]
                        sums[2 * i + 1] = sums[2 * i + 1] + weight * mPartO[row + p * m, at + 1]
            empty = total == 0.0
            factor = Float32(0.0) if empty else Float32(1.0) / total
            for i in range_constexpr(self.pairs):
                at = 64 * i + 2 * lane
                if at < self.d_v:
                    mO[row0 + query, head, at] = (sums[2 * i] * factor).to(self.dtype)
                    mO[row0 + query, head, at + 1] = (sums[2 * i + 1] * factor).to(self.dtype)
            if want_lse == 1 and lane == 0:
                mLSE[head, row0 + query] = -Float32.inf if empty else (base + ptx.log2(total)) * LN2
