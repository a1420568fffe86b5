"""Pages of K and V as the engines lay them out: one shape, many strides."""

from __future__ import annotations

from collections.abc import Callable

import torch

Pages = tuple[torch.Tensor, torch.Tensor]
Maker = Callable[[int, int, int, int, int, torch.dtype, torch.device], Pages]
"""(pages, page_size, kv_heads, d, d_v, dtype, device) to views [pages, page_size, kv_heads, d] and [.., d_v]."""


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def _pools(p: int, n: int, h: int, d: int, dv: int, dtype: torch.dtype, device: torch.device) -> Pages:
    k, v = _empty((p * n, h, d), dtype, device), _empty((p * n, h, dv), dtype, device)
    return k.view(p, n, h, d), v.view(p, n, h, dv)


def _hnd(p: int, n: int, h: int, d: int, dv: int, dtype: torch.dtype, device: torch.device) -> Pages:
    return _empty((p, h, n, d), dtype, device).transpose(1, 2), _empty((p, h, n, dv), dtype, device).transpose(1, 2)


def _stacked(p: int, n: int, h: int, d: int, dv: int, dtype: torch.dtype, device: torch.device) -> Pages:
    both = _empty((p, 2, n, h, max(d, dv)), dtype, device)
    return both[:, 0, ..., :d], both[:, 1, ..., :dv]


def _interleaved(p: int, n: int, h: int, d: int, dv: int, dtype: torch.dtype, device: torch.device) -> Pages:
    both = _empty((p, n, h, d + dv), dtype, device)
    return both[..., :d], both[..., d:]


def _interleaved_hnd(p: int, n: int, h: int, d: int, dv: int, dtype: torch.dtype, device: torch.device) -> Pages:
    both = _empty((p, h, n, d + dv), dtype, device).transpose(1, 2)
    return both[..., :d], both[..., d:]


def _connector(p: int, n: int, h: int, d: int, dv: int, dtype: torch.dtype, device: torch.device) -> Pages:
    layers = _empty((p, 3, h, n, d + dv), dtype, device)  # a block holds all layers: its stride is over one page
    both = layers[:, 1].transpose(1, 2)
    return both[..., :d], both[..., d:]


def _odd_singletons(p: int, n: int, h: int, d: int, dv: int, dtype: torch.dtype, device: torch.device) -> Pages:
    k, v = _pools(p, n, h, d, dv, dtype, device)

    def odd(t: torch.Tensor) -> torch.Tensor:
        # Dimensions of size 1 may carry any stride at all; these are ones that would leave the pool if used.
        strides = [s if size > 1 else 7_777_777 for size, s in zip(t.shape[:-1], t.stride()[:-1])]
        return t.as_strided(t.shape, (*strides, 1))

    return odd(k), odd(v)


LAYOUTS: dict[str, Maker] = {
    "pools": _pools,  # SGLang: one pool of token rows each
    "hnd": _hnd,
    "stacked": _stacked,  # vLLM 0.25: [pages, 2, page_size, heads, d]
    "interleaved": _interleaved,  # vLLM 0.32 and later: K and V side by side in the last dimension
    "interleaved-hnd": _interleaved_hnd,
    "connector": _connector,  # vLLM with KV connectors: layers within a block
    "odd-singletons": _odd_singletons,  # tensor parallel: sizes of 1 with meaningless strides
}


def make_pages(
    layout: str,
    pages: int,
    page_size: int,
    kv_heads: int,
    head_dim: int,
    head_dim_v: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Pages:
    """Pages full of NaN in one of LAYOUTS.

    Returns:
        k_pages [pages, page_size, kv_heads, head_dim] and v_pages [.., head_dim_v], both writable.
    """
    return LAYOUTS[layout](pages, page_size, kv_heads, head_dim, head_dim_v, dtype, torch.device(device))
