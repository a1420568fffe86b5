"""The oracle: attention by its definition, one request at a time, dense and in float64.

It shares no code with any kernel, the reference included.
"""

from __future__ import annotations

import torch

from ..batch import PrefillBatch
from ..spec import LayerSpec


def attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PrefillBatch,
    spec: LayerSpec,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What prefill() should give, on the device of q; the arguments are prefill()'s.

    Returns:
        out float64 [total_q, q_heads, d_v] and lse float64 [q_heads, total_q]; NaN in rows that belong to no request.
    """
    scale = spec.head_dim**-0.5 if scale is None else scale
    out = q.new_full((q.shape[0], spec.q_heads, v_pages.shape[-1]), torch.nan, dtype=torch.float64)
    lse = q.new_full((spec.q_heads, q.shape[0]), torch.nan, dtype=torch.float64)
    bounds = batch.cu_seqlens_q.tolist()
    for i, kv_len in enumerate(batch.kv_lens.tolist()):
        rows = slice(bounds[i], bounds[i + 1])
        n = bounds[i + 1] - bounds[i]
        keep = _visible(n, kv_len, spec, q.device)  # [n, kv_len]
        seen = keep.any(0) if n else torch.zeros(kv_len, dtype=torch.bool, device=q.device)
        k = _keys(k_pages, batch, i, kv_len, seen).repeat_interleave(spec.ratio, 1)  # [kv_len, q_heads, d]
        v = _keys(v_pages, batch, i, kv_len, seen).repeat_interleave(spec.ratio, 1)
        scores = torch.einsum("qhd,khd->hqk", q[rows].double(), k) * scale
        if spec.softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~keep, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, n, 1)], -1)
        logs = torch.logsumexp(scores, -1) if scores.shape[-1] else scores.new_full(scores.shape[:2], -torch.inf)
        weights = torch.exp(scores - logs.masked_fill(logs == -torch.inf, 0.0)[..., None])[..., :kv_len]
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v)
        lse[:, rows] = logs
    return out, lse


def _visible(q_len: int, kv_len: int, spec: LayerSpec, device: torch.device) -> torch.Tensor:
    positions = torch.arange(q_len, device=device)[:, None] + kv_len - q_len
    distance = torch.arange(kv_len, device=device) - positions
    left, right = spec.window
    keep = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        keep &= distance >= -left
    if right is not None:
        keep &= distance <= right
    return keep


def _keys(pages: torch.Tensor, batch: PrefillBatch, i: int, kv_len: int, seen: torch.Tensor) -> torch.Tensor:
    """Keys or values of request i in float64, [kv_len, kv_heads, d]; 0 where no query looks."""
    found = pages.new_zeros((kv_len, *pages.shape[2:]), dtype=torch.float64)
    keys = seen.nonzero().flatten()
    found[keys] = pages[batch.page_table[i][keys // batch.page_size].long(), keys % batch.page_size].double()
    return found
