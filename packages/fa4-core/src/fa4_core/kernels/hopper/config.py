"""Configuration as data: one tile shape for each head dim, and the compile key. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GRANULE = 8  # query rows of one head that are loaded and masked together: the rows of one swizzle atom
BOX = 16  # key rows of one TMA box: the largest power of two that divides the pages engines use
COLUMNS = 64  # elements of one swizzled row: 128 bytes of a 16-bit type
SMEM_LIMIT = 227 * 1024  # of one block on sm_90

Load = Literal["boxes", "slots"]
"""How keys reach shared memory. "boxes": each box lies in one page (page sizes that are multiples of BOX). "slots": a
box of keys in consecutive slots comes from the pool, any other from scratch, where it was gathered (any page size)."""


@dataclass(frozen=True)
class Tile:
    """The shape of a block's work.

    Args:
        groups: Consumer warpgroups, 64 packed query rows each.
        n: Keys of a tile, a multiple of BOX.
        k_stages: Tiles of K in flight.
        v_stages: Tiles of V in flight.
        q_stages: Query tiles in flight; 2 hides the next tile's load behind this one's work.
    """

    groups: int
    n: int
    k_stages: int
    v_stages: int
    q_stages: int

    @property
    def m(self) -> int:
        """Packed query rows of a block."""
        return 64 * self.groups

    @property
    def granules(self) -> int:
        """Granules of a block's query tile."""
        return self.m // GRANULE

    @property
    def threads(self) -> int:
        """Of a block: the producer warpgroup and the consumers."""
        return 128 * (self.groups + 1)

    @property
    def registers(self) -> tuple[int, int]:
        """(consumer, producer) registers a thread after the split; together within the file's 65,536."""
        return {2: (232, 40), 3: (160, 32)}[self.groups]


TILES: dict[tuple[int, int], Tile] = {
    (64, 64): Tile(groups=3, n=128, k_stages=4, v_stages=4, q_stages=2),
    (96, 96): Tile(groups=3, n=80, k_stages=3, v_stages=3, q_stages=2),  # columns 96 to 127 are zeros
    (128, 128): Tile(groups=3, n=80, k_stages=3, v_stages=3, q_stages=2),
    (192, 128): Tile(groups=3, n=80, k_stages=3, v_stages=3, q_stages=1),
    (256, 256): Tile(groups=2, n=64, k_stages=2, v_stages=3, q_stages=1),
}
"""By (head dim, value head dim)."""

NARROW: dict[tuple[int, int], Tile] = {(64, 64): Tile(groups=3, n=64, k_stages=6, v_stages=6, q_stages=2)}
"""For windows of at most NARROW_KEYS keys: shorter key tiles waste less at both ends of what a query tile sees."""
NARROW_KEYS = 256

SOFTCAP: dict[tuple[int, int], Tile] = {
    (64, 64): Tile(groups=3, n=112, k_stages=4, v_stages=4, q_stages=2),
    (192, 128): Tile(groups=3, n=64, k_stages=3, v_stages=3, q_stages=1),
}
"""With softcap, where a tile of TILES leaves no registers for its tanh: ptxas spilled 6 and 14 of them."""


@dataclass(frozen=True)
class Config:
    """A compile key: everything that changes code, nothing that a step decides.

    Args:
        d: Elements of a query or key head.
        d_v: Elements of a value head.
        dtype: "bf16" or "fp16".
        load: How keys reach shared memory.
        softcap: Scores pass through a tanh.
        narrow: The window is short.
    """

    d: int
    d_v: int
    dtype: Literal["bf16", "fp16"]
    load: Load
    softcap: bool = False
    narrow: bool = False

    @property
    def tile(self) -> Tile:
        """The tile shape."""
        dims = self.d, self.d_v
        if self.narrow:
            return NARROW[dims]
        return SOFTCAP.get(dims, TILES[dims]) if self.softcap else TILES[dims]

    @property
    def width(self) -> int:
        """Columns of Q and K in shared memory: whole panels, zeros past d."""
        return -(-self.d // COLUMNS) * COLUMNS

    @property
    def width_v(self) -> int:
        """Columns of V and of the output in shared memory, likewise."""
        return -(-self.d_v // COLUMNS) * COLUMNS

    @property
    def name(self) -> str:
        """A C identifier, the name of the compiled function."""
        dims = f"d{self.d}" if self.d == self.d_v else f"d{self.d}v{self.d_v}"
        return f"fa4_hopper_{dims}_{self.dtype}_{self.load}" + "_softcap" * self.softcap + "_narrow" * self.narrow

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block, barriers left out. The output leaves through the query tile's buffer."""
        t = self.tile
        keys = t.n * (t.k_stages * self.width + t.v_stages * self.width_v)
        return 2 * (t.q_stages * t.m * max(self.width, self.width_v) + keys)


def all_kernels() -> dict[str, Config | str]:
    """Every kernel that can be asked for: the name of its function, and the key it is compiled by."""
    widths = dict.fromkeys(d_v for _, d_v in TILES)
    helpers = ["find_runs", "gather", *(f"combine_{dtype}_{d_v}" for dtype in ("bf16", "fp16") for d_v in widths)]
    return {name_of(key): key for key in (*all_configs(), *helpers)}


def name_of(key: Config | str) -> str:
    """The function's name: a C identifier."""
    return f"fa4_hopper_{key}" if isinstance(key, str) else key.name


def all_configs() -> list[Config]:
    """Every variant there is."""
    return [
        Config(d, d_v, dtype, load, softcap, narrow)
        for narrow, tiles in ((False, TILES), (True, NARROW))
        for d, d_v in tiles
        for dtype in ("bf16", "fp16")
        for load in ("boxes", "slots")
        for softcap in (False, True)
    ]
