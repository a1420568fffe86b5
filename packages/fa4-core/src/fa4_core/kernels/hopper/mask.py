"""Which keys a row sees, and which tiles need no mask. Written to run on ints here and on registers in the kernel."""

from __future__ import annotations

from cutlass import Float32, Int32, cute, range_constexpr

from .softmax import element




@cute.jit
def apply(acc: cute.Tensor, starts: cute.Tensor, stops: cute.Tensor, first_key: Int32, lane: Int32) -> None:
    """Hide what lies outside [start, stop) of each of a thread's two rows; first_key is the tile's."""
    shift = first_key + 2 * (lane % 4)
    for r in range_constexpr(2):
        start, stop = starts[r] - shift, stops[r] - shift
        for j in range_constexpr(cute.size(acc) // 4):
            for c in range_constexpr(2):
                key = 8 * j + c
                hidden = key >= stop or key < start
                acc[element(j, r, c)] = -Float32.inf if hidden else acc[element(j, r, c)]
