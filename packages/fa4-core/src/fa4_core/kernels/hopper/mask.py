"""Hiding scores that a row does not see: two counts a row, one bit an element."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute, range_constexpr

from . import ptx
from .softmax import element


@cute.jit
def elements_before(key: Int32, n: cutlass.Constexpr) -> Int32:
    """How many of a lane's elements of a row stand before a key; element i stands at key 8 (i // 2) + i % 2."""
    key = cutlass.max(0, cutlass.min(key, n))
    return 2 * (key // 8) + cutlass.min(key % 8, 2)


@cute.jit
def apply(acc: cute.Tensor, starts: cute.Tensor, stops: cute.Tensor, first_key: Int32, lane: Int32) -> None:
    """Hide what lies outside [start, stop) of each of a thread's two rows; first_key is the tile's.

    32 elements of a row at a time, so that a word of bits holds them; tests of single bits become predicates in bulk.
    """
    shift = first_key + 2 * (lane % 4)
    half = cute.size(acc) // 2
    for r in range_constexpr(2):
        for word in range_constexpr(-(-half // 32)):
            count = min(32, half - 32 * word)
            before = elements_before(starts[r] - shift - 128 * word, 4 * count)
            upto = elements_before(stops[r] - shift - 128 * word, 4 * count)
            bits = ptx.shift_left(Int32(-1), before) & ~ptx.shift_left(Int32(-1), upto)
            for i in range_constexpr(count):
                e = element(16 * word + i // 2, r, i % 2)
                acc[e] = acc[e] if (bits & (1 << i if i < 31 else -(1 << 31))) != 0 else -Float32.inf
