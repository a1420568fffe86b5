"""Tensors as the kernels want them: views of pools, checks of alignment."""

from __future__ import annotations

import torch

from ...errors import bad

ALIGN = 8  # elements: 16 bytes, what the copy engine and vector stores need


def aligned(t: torch.Tensor) -> bool:
    """Rows start at multiples of 16 bytes."""
    return t.data_ptr() % 16 == 0 and t.stride(0) % ALIGN == 0 and t.stride(1) % ALIGN == 0


def is_flat(pool: torch.Tensor) -> bool:
    """Rows of consecutive pages stand at one stride, so that slots are one dimension."""
    pages, page_size = pool.shape[:2]
    return pages == 1 or page_size == 1 or pool.stride(0) == page_size * pool.stride(1)


def as_pool(name: str, pool: torch.Tensor) -> torch.Tensor:
    """The pool without strides that mean nothing; ValueError where rows do not start at multiples of 16 bytes."""
    shape, strides = pool.shape, pool.stride()
    if 1 in shape[:3] or 0 in shape:
        shape = tuple(max(n, 1) for n in shape)  # an empty pool is never read
        strides = (*(ALIGN if n == 1 else s for n, s in zip(shape[:3], strides)), 1)
        pool = pool.as_strided(shape, strides) if pool.numel() else pool.new_zeros(shape)
    if pool.data_ptr() % 16 or strides[0] % ALIGN or strides[1] % ALIGN or strides[2] % ALIGN:
        raise bad(name, f"of strides {strides} at {pool.data_ptr():#x}", "rows that start at multiples of 16 bytes")
    return pool


def as_slots(pool: torch.Tensor) -> torch.Tensor:
    """A flat pool as one page of all slots."""
    pages, page_size, heads, d = pool.shape
    stride = pool.stride(0) if page_size == 1 else pool.stride(1)
    return pool.as_strided((1, pages * page_size, heads, d), (ALIGN, stride, pool.stride(2), 1))


def as_chunks(rows: torch.Tensor) -> torch.Tensor:
    """[..., d] of a 16-bit type as [..., d / 8, 4] of int32."""
    words = rows.view(torch.int32)
    return words.view(*words.shape[:-1], -1, 4)
