"""The running softmax of a thread's two rows, in base 2."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr

from . import ptx

QUAD = 4  # lanes that share a row of an accumulator


def quad_max(x: Float32) -> Float32:
    """The largest over the four lanes of a row."""
    for step in (1, 2):
        x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=step))
    return x


def quad_sum(x: Float32) -> Float32:
    """The sum over the four lanes of a row, the same bits in each."""
    for step in (1, 2):
        x = x + cute.arch.shuffle_sync_bfly(x, offset=step)
    return x


def element(j: int, r: int, c: int) -> int:
    """Register of an accumulator that holds row r (of two), column 8 j + 2 lane + c."""
    return 4 * j + 2 * r + c


@cute.jit
def row_max(acc: cute.Tensor, r: int, start: Float32) -> Float32:
    """Largest of a thread's elements of row r and start; four chains, to shorten the wait of each on the last."""
    n = cute.size(acc) // 4
    best = [start, acc[element(0, r, 0)], acc[element(0, r, 1)], acc[element(1, r, 0)]]
    for i in range_constexpr(3, 2 * n):
        best[i % 4] = cute.arch.fmax(best[i % 4], acc[element(i // 2, r, i % 2)])
    return cute.arch.fmax(cute.arch.fmax(best[0], best[1]), cute.arch.fmax(best[2], best[3]))


@cute.jit
def step(acc: cute.Tensor, top: cute.Tensor, total: cute.Tensor, decay: cute.Tensor, scale: Float32, masked: cutlass.Constexpr,
         first: cutlass.Constexpr) -> None:  # fmt: skip
    """Turn a tile's scores into weights relative to the new maximum; update the rows' maximum, sum and decay.

    top and total hold one value a row, total summed over this thread's own columns alone until the end. A row's
    operations depend on nothing but the row, so its bits do not depend on what shares its tile.
    """
    n = cute.size(acc) // 4
    for r in range_constexpr(2):
        if const_expr(first):
            new = quad_max(row_max(acc, r, acc[element(1, r, 1)]))
        else:
            new = quad_max(row_max(acc, r, top[r]))
        base = new
        if const_expr(masked):  # a row that sees nothing yet: exp2(-inf - 0) = 0, not exp2(-inf + inf)
            base = Float32(0.0) if new == -Float32.inf else new
        if const_expr(not first):
            decay[r] = ptx.exp2((top[r] - base) * scale)
        top[r] = new
        offset = -base * scale
        sums = [Float32(0.0) if const_expr(first) else total[r] * decay[r], Float32(0.0), Float32(0.0), Float32(0.0)]
        for i in range_constexpr(2 * n):
            e = element(i // 2, r, i % 2)
            acc[e] = ptx.exp2(ptx.fma(acc[e], scale, offset))
            sums[i % 4] = sums[i % 4] + acc[e]
        total[r] = (sums[0] + sums[1]) + (sums[2] + sums[3])


@cute.jit
def rescale(acc: cute.Tensor, factor: cute.Tensor) -> None:
    """Multiply each row of an output accumulator."""
    for i in range_constexpr(cute.size(acc)):
        acc[i] = acc[i] * factor[i // 2 % 2]


@cute.jit
def soften(acc: cute.Tensor, inner: Float32) -> None:
    """tanh of each score over the cap; inner is 2 log2(e) scale / cap. The cap itself is in the softmax's scale.

    1 - 2 / (exp(2 x) + 1) instead of tanh.approx, whose error of 5e-4 the cap would multiply.
    """
    for i in range_constexpr(cute.size(acc)):
        acc[i] = Float32(1.0) - Float32(2.0) * cute.arch.rcp_approx(ptx.exp2(acc[i] * inner) + Float32(1.0))


@cute.jit
def pack(acc: cute.Tensor, out: cute.Tensor, dtype: type) -> None:
    """Round weights to the 16-bit type; the accumulator's order is the order of the next product's A operand."""
    pairs = cute.recast_tensor(out, Int32)
    for i in range_constexpr(cute.size(acc) // 2):
        pairs[i] = ptx.pack_half2(acc[2 * i], acc[2 * i + 1], dtype)


@cute.jit
def clear(acc: cute.Tensor) -> None:
    """Zero an accumulator."""
    for i in range_constexpr(cute.size(acc)):
        acc[i] = Float32(0.0)
