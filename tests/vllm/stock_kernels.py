"""vLLM's own FlashAttention backend on a CPU: its classes as they are, its CUDA kernels in plain torch.

What the stock builder computes ahead for FlashAttention 3 describes one batch and lies in one persistent buffer. The
stand-in for it spells the batch out, and the stand-in for the kernel refuses to run on any other: metadata that was
cut, or overwritten by a second build, fails here as it would give wrong tokens on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends import flash_attn

from fa4_core import LayerSpec, PrefillBatch
from fa4_core.testing import attention

calls: list[int] = []
"""Query rows of each call of the kernel."""


def get_scheduler_metadata(
    *, batch_size: int, max_seqlen_q: int, cache_seqlens: torch.Tensor, cu_seqlens_q: torch.Tensor,
    window_size: tuple[int, int], **rest: Any,
) -> torch.Tensor:  # fmt: skip
    """int32 [4 + 2 * batch_size]: the batch itself."""
    head = torch.tensor([batch_size, max_seqlen_q, *window_size], dtype=torch.int32)
    return torch.cat([head, cache_seqlens[:batch_size], cu_seqlens_q[1 : batch_size + 1]])


def flash_attn_varlen_func(
    *, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, causal: bool,
    window_size: list[int] | None, block_table: torch.Tensor, softcap: float, scheduler_metadata: torch.Tensor | None,
    s_aux: torch.Tensor | None = None, **rest: Any,
) -> torch.Tensor:  # fmt: skip
    """The kernel; its arguments are those of the stock impl's call."""
    window = tuple(window_size or (-1, -1))
    if scheduler_metadata is not None:
        mine = get_scheduler_metadata(
            batch_size=len(seqused_k), max_seqlen_q=max_seqlen_q, cache_seqlens=seqused_k,
            cu_seqlens_q=cu_seqlens_q, window_size=window,
        )  # fmt: skip
        if not torch.equal(mine, scheduler_metadata):
            raise RuntimeError(f"the scheduler metadata describe another batch: {scheduler_metadata}, not {mine}")
    if not causal or max_seqlen_q < int(cu_seqlens_q.diff().max()) or max_seqlen_k < int(seqused_k.max()):
        raise RuntimeError("not a causal batch within its bounds")
    tokens = int(cu_seqlens_q[-1])
    spec = LayerSpec(
        q.shape[1], k.shape[2], q.shape[2], dtype=q.dtype, kv_dtype=k.dtype, softcap=bool(softcap),
        window=(None if window[0] < 0 else window[0], None), sinks=s_aux is not None,
    )  # fmt: skip
    batch = PrefillBatch(cu_seqlens_q, seqused_k, block_table, k.shape[1])
    found, _ = attention(q[:tokens], k, v, batch, spec, scale=softmax_scale, softcap=softcap or 0.0, sinks=s_aux)
    out[:tokens] = found.to(out.dtype)
    calls.append(tokens)
    return out


def reshape_and_cache_flash(
    key: torch.Tensor, value: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor,
    slot_mapping: torch.Tensor, *rest: Any,
) -> None:  # fmt: skip
    """The writer of the cache."""
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            page, row = divmod(slot, k_pages.shape[1])
            k_pages[page, row], v_pages[page, row] = key[token], value[token]


def use(monkeypatch: Any) -> None:
    """Let the stock backend run on a CPU, as FlashAttention 3, until the test ends."""
    calls.clear()
    for function in (get_scheduler_metadata, flash_attn_varlen_func, reshape_and_cache_flash):
        monkeypatch.setattr(flash_attn, function.__name__, function, raising=False)
    for found in ("is_flash_attn_varlen_func_available", "flash_attn_supports_sinks"):
        monkeypatch.setattr(flash_attn, found, lambda: True, raising=False)
    monkeypatch.setattr(flash_attn, "get_flash_attn_version", lambda *args, **kwargs: 3)
