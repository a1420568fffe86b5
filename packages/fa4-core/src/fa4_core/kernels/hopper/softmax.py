"""The running softmax of a thread's two rows, in base 2."""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute, range_constexpr

from . import ptx

SLACK = 8.0  # in powers of two


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
def find_top(acc: cute.Tensor, top: cute.Tensor, decay: cute.Tensor, scale: Float32,
             first: cutlass.Constexpr) -> Boolean:  # fmt: skip
    """Update the rows' maxima by a tile's scores; returns whether the output of any row of the warp must be rescaled.

    A maximum only moves when it would by more than SLACK: until then weights grow to 2 ** SLACK at most, which costs
    no accuracy, and the output accumulator need not be touched. A row's operations and decisions depend on nothing but
    the row, so its bits do not depend on what shares its tile.
    """
    moved = Boolean(False)
    for r in range_constexpr(2):
        if const_expr(first):
            top[r] = quad_max(row_max(acc, r, acc[element(1, r, 1)]))
        else:
            new = quad_max(row_max(acc, r, top[r]))
            far = (new - top[r]) * scale > SLACK  # inf - inf is no number, and not far
            decay[r] = ptx.exp2((top[r] - new) * scale) if far else Float32(1.0)
            top[r] = new if far else top[r]
            moved = moved or far
    return cute.arch.vote_any_sync(moved)


@cute.jit
def exponentiate(acc: cute.Tensor, top: cute.Tensor, scale: Float32, masked: cutlass.Constexpr) -> None:
    """Scores to weights."""
    offsets = cute.make_rmem_tensor(2, Float32)
    for r in range_constexpr(2):
        base = top[r]
        if const_expr(masked):  # a row that sees nothing yet: exp2(-inf - 0) = 0, not exp2(-inf + inf)
            base = Float32(0.0) if base == -Float32.inf else base
        offsets[r] = -base * scale
    for i in range_constexpr(cute.size(acc) // 2):
        for r in range_constexpr(2):  # both rows in turn, to shorten the wait of each on its own sums
            e = element(i // 2, r, i % 2)
            acc[e] = ptx.exp2(ptx.fma(acc[e], scale, offsets[r]))


@cute.jit
def add_up(acc: cute.Tensor, total: cute.Tensor, decay: cute.Tensor, first: cutlass.Constexpr) -> None:
    """Take a tile's weights into the rows' sums, each thread its own columns."""
    n = cute.size(acc) // 4
    for r in range_constexpr(2):
        start = Float32(0.0) if const_expr(first) else total[r] * decay[r]
        sums = [start + acc[element(0, r, 0)], acc[element(0, r, 1)], acc[element(1, r, 0)], acc[element(1, r, 1)]]
        for i in range_constexpr(4, 2 * n):
            sums[i % 4] = sums[i % 4] + acc[element(i // 2, r, i % 2)]
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
def divide(acc: cute.Tensor, factor: cute.Tensor) -> None:
    """The last rescale: rows of factor 0 saw nothing, and their registers may hold anything."""
    for r in range_constexpr(2):
        seen = factor[r] != 0.0
        for i in range_constexpr(cute.size(acc) // 2):
            e = element(i // 2, r, i % 2)
            acc[e] = acc[e] * factor[r] if seen else Float32(0.0)
