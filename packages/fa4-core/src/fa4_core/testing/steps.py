"""Steps to run a kernel on: requests, pages in random order, and poison wherever the contract forbids to look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..batch import PrefillBatch
from ..prefill import prefill
from ..spec import LayerSpec
from .layouts import make_pages
from .oracle import attention

UNDEFINED = (-1, 2**31 - 1, -(2**31))  # what an entry that must not be dereferenced may hold


@dataclass(frozen=True)
class Step:
    """Everything that one prefill() call takes."""

    q: torch.Tensor  # [total_q, q_heads, d]
    k_pages: torch.Tensor  # [pages, page_size, kv_heads, d]
    v_pages: torch.Tensor  # [pages, page_size, kv_heads, d_v]
    batch: PrefillBatch
    spec: LayerSpec
    values: dict[str, Any]  # scale, softcap, sinks

    def prefill(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Run it: (out, lse), written into buffers that start as NaN."""
        rows = self.q.shape[0]
        out = self.q.new_full((rows, self.spec.q_heads, self.v_pages.shape[-1]), torch.nan)
        lse = self.q.new_full((self.spec.q_heads, rows), torch.nan, dtype=torch.float32)
        return prefill(
            self.q, self.k_pages, self.v_pages, self.batch, self.spec, out=out, lse=lse, return_lse=True,
            **self.values, **options,
        )  # fmt: skip

    def oracle(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What it should give, in float64."""
        return attention(self.q, self.k_pages, self.v_pages, self.batch, self.spec, **self.values)


def make_step(
    spec: LayerSpec,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    page_size: int = 16,
    layout: str = "pools",
    seed: int = 0,
    scale: float | None = None,
    softcap: float = 30.0,
    spare_rows: int = 0,
    device: torch.device | str = "cpu",
) -> Step:
    """A step of random numbers in pages of random order.

    Rows that hold no key are NaN, and so are keys outside every query's window; table entries that must not be
    dereferenced are nonsense. A request's numbers depend on the seed and its place in the lists alone, not on the
    page size, the layout or the requests after it.

    Args:
        spec: The layer.
        q_lens: Query tokens of each request.
        kv_lens: Keys of each request, cached and new.
        page_size: Rows of a page.
        layout: One of LAYOUTS.
        seed: Of all random numbers.
        scale: Passed on.
        softcap: Passed on where spec.softcap is on.
        spare_rows: Rows of q after the last request, as engines pad.
        device: Where it all lies.
    """
    counts = [-(-n // page_size) for n in kv_lens]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)) + 1  # page 0 is nobody's
    k_pages, v_pages = make_pages(
        layout, sum(counts) + 1, page_size, spec.kv_heads, spec.head_dim, spec.head_dim_v,
        spec.kv_dtype, device,
    )  # fmt: skip
    table = torch.tensor(UNDEFINED).repeat(len(kv_lens), max(counts, default=0) + 2)
    table = table[:, : max(counts, default=0) + 2].to(torch.int32)
    rows, at = [], 0
    for i, (q_len, kv_len, count) in enumerate(zip(q_lens, kv_lens, counts)):
        random = torch.Generator().manual_seed(seed * 1_000_003 + i)
        q, k, v = (
            torch.randn(n, h, d, generator=random)
            for n, h, d in (
                (q_len, spec.q_heads, spec.head_dim),
                (kv_len, spec.kv_heads, spec.head_dim),
                (kv_len, spec.kv_heads, spec.head_dim_v),
            )
        )
        rows.append(q)
        pages = order[at : at + count]
        at += count
        seen = _seen(spec, q_len, kv_len)
        for pool, new in ((k_pages, k), (v_pages, v)):
            keys = torch.arange(kv_len)[seen]
            pool[pages[keys // page_size].to(pool.device), (keys % page_size).to(pool.device)] = new[seen].to(pool)
        for page, number in enumerate(pages.tolist()):
            if seen[page * page_size : (page + 1) * page_size].any():
                table[i, page] = number
    rows.append(torch.full((spare_rows, spec.q_heads, spec.head_dim), torch.nan))
    lens = torch.tensor([0, *q_lens], dtype=torch.int32)
    batch = PrefillBatch(
        torch.cumsum(lens, 0, dtype=torch.int32).to(device),
        torch.tensor(kv_lens, dtype=torch.int32).reshape(-1).to(device),
        table.to(device),
        page_size,
        host_q_lens=list(q_lens),
        host_kv_lens=list(kv_lens),
    )
    values: dict[str, Any] = {"scale": scale}
    if spec.softcap:
        values["softcap"] = softcap
    if spec.sinks:
        values["sinks"] = torch.randn(spec.q_heads, generator=torch.Generator().manual_seed(seed)).to(device)
    return Step(torch.cat(rows).to(spec.dtype).to(device), k_pages, v_pages, batch, spec, values)


def _seen(spec: LayerSpec, q_len: int, kv_len: int) -> torch.Tensor:
    """Which keys some query sees, bool [kv_len]."""
    left, right = spec.window
    keys = torch.arange(kv_len)
    if q_len == 0:
        return torch.zeros(kv_len, dtype=torch.bool)
    first, last = kv_len - q_len, kv_len - 1
    seen = torch.ones(kv_len, dtype=torch.bool)
    if left is not None:
        seen &= keys >= first - left
    if right is not None:
        seen &= keys <= last + right
    return seen
