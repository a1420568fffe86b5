"""Paged attention problems on the GPU, and what the answer is in fp32."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch

from fa4_core import LayerSpec, PrefillBatch

GARBAGE = -123456789


@dataclass
class Scene:
    """A batch, its tensors and the way its pool was laid out."""

    spec: LayerSpec
    batch: PrefillBatch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_lens: list[int]
    kv_lens: list[int]
    softcap: float
    sinks: torch.Tensor | None
    dense: list[tuple[torch.Tensor, torch.Tensor]]  # each request's keys and values


LAYOUTS = ("plain", "planes", "interleaved", "hnd", "padded")


def empty_pool(layout, pages, page, heads, d, d_v, dtype, fill):
    """(k_pages, v_pages), every element `fill`."""

    def full(*shape):
        return torch.full(shape, fill, dtype=dtype, device="cuda")

    if layout == "planes" and d == d_v:  # vLLM 0.25.1: one tensor, K's pages then V's
        both = full(2, pages, page, heads, d)
        return both[0], both[1]
    if layout == "interleaved":  # vLLM 0.32 and later: a row's key and value side by side
        both = full(pages, page, heads, d + d_v)
        return both[..., :d], both[..., d:]
    if layout == "hnd":
        return full(pages, heads, page, d).transpose(1, 2), full(pages, heads, page, d_v).transpose(1, 2)
    if layout == "padded":  # a KV connector's: the page stride exceeds a page
        k = full(pages, page + 3, heads, d)[:, :page]
        return k, full(pages, page + 5, heads, d_v)[:, :page]
    return full(pages, page, heads, d), full(pages, page, heads, d_v)


def make(spec, q_lens, kv_lens, page, *, layout="plain", order="random", softcap=0.0, seed=0, canary=math.nan,
         reclaim=False, gain=1.0):  # fmt: skip
    """A scene. Rows that hold no key are `canary`, table entries that name no page are garbage."""
    rng, gen = random.Random(seed), torch.Generator("cuda").manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, device="cuda", generator=gen).to(spec.dtype)

    counts = [-(-n // page) for n in kv_lens]
    total = sum(counts) + 3
    k, v = empty_pool(layout, total, page, spec.kv_heads, spec.head_dim, spec.head_dim_v, spec.dtype, canary)
    ids = list(range(1, total))
    if order == "random":
        rng.shuffle(ids)
    if order == "mixed":  # runs of consecutive pages between scattered ones
        cut = len(ids) // 2
        tail = ids[cut:]
        rng.shuffle(tail)
        ids = ids[:cut] + tail
    width = max([*counts, 1]) + 2
    table = torch.full((len(kv_lens), width), GARBAGE, dtype=torch.int32)
    dense, at = [], 0
    for i, n in enumerate(kv_lens):
        mine = torch.tensor(ids[at : at + counts[i]], dtype=torch.int32)
        at += counts[i]
        table[i, : counts[i]] = mine
        keys, values = randn(n, spec.kv_heads, spec.head_dim), randn(n, spec.kv_heads, spec.head_dim_v)
        keys *= gain
        lo = 0
        if reclaim and spec.window[0] is not None:  # pages that no query sees are gone
            lo = max(0, n - q_lens[i] - spec.window[0])
            table[i, : lo // page] = GARBAGE
        pos = torch.arange(lo, n)
        pages = mine.long()[pos // page].cuda()
        k[pages, (pos % page).cuda()] = keys[lo:]
        v[pages, (pos % page).cuda()] = values[lo:]
        dense.append((keys, values))
    cu = torch.tensor([0, *torch.tensor(q_lens, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)
    batch = PrefillBatch(cu.cuda(), torch.tensor(kv_lens, dtype=torch.int32).cuda(), table.cuda(), page,
                         host_q_lens=q_lens, host_kv_lens=kv_lens)  # fmt: skip
    q = randn(sum(q_lens), spec.q_heads, spec.head_dim) * gain
    sinks = torch.randn(spec.q_heads, device="cuda", generator=gen) * 2 if spec.sinks else None
    return Scene(spec, batch, q, k, v, list(q_lens), list(kv_lens), softcap, sinks, dense)


def answer(scene, scale):
    """(out, lse) in fp32, straight from the definition."""
    spec = scene.spec
    out = torch.zeros(scene.q.shape[0], spec.q_heads, spec.head_dim_v, device="cuda")
    lse = torch.full((spec.q_heads, scene.q.shape[0]), -math.inf, device="cuda")
    row = 0
    for (keys, values), n, m in zip(scene.dense, scene.q_lens, scene.kv_lens):
        for a in range(0, n, 1024):
            b = min(n, a + 1024)
            q = scene.q[row + a : row + b].float()
            k = keys.float().repeat_interleave(spec.ratio, 1)
            v = values.float().repeat_interleave(spec.ratio, 1)
            s = torch.einsum("qhd,khd->hqk", q, k) * scale
            if scene.softcap > 0:
                s = scene.softcap * torch.tanh(s / scene.softcap)
            pos = torch.arange(m - n + a, m - n + b, device="cuda")[:, None]
            key = torch.arange(m, device="cuda")[None]
            left, right = spec.window
            seen = torch.ones(b - a, m, dtype=torch.bool, device="cuda")
            if left is not None:
                seen &= key >= pos - left
            if right is not None:
                seen &= key <= pos + right
            s = s.masked_fill(~seen, -math.inf)
            if scene.sinks is not None:
                s = torch.cat([s, scene.sinks.float()[:, None, None].expand(-1, b - a, 1)], -1)
                v = torch.cat([v, torch.zeros_like(v[:1])], 0) if m else v.new_zeros(1, spec.q_heads, spec.head_dim_v)
            if s.shape[-1] == 0:
                continue
            logs = torch.logsumexp(s, -1)
            p = torch.exp(s - logs.masked_fill(logs == -math.inf, 0.0)[..., None])
            out[row + a : row + b] = torch.einsum("hqk,khd->qhd", p, v)
            lse[:, row + a : row + b] = logs
        row += n
    return out, lse


def run(scene, scale, *, pad=5, invariant=True):
    """Our kernel's (out, lse), into poisoned buffers with rows to spare that must stay as they are."""
    from fa4_core.kernels.hopper import HopperKernel

    spec, rows = scene.spec, scene.q.shape[0]
    q = torch.cat([scene.q, torch.full((pad, *scene.q.shape[1:]), math.nan, dtype=spec.dtype, device="cuda")])
    out = torch.full((rows + pad, spec.q_heads, spec.head_dim_v), 777.0, dtype=spec.dtype, device="cuda")
    lse = torch.full((spec.q_heads, rows + pad), 777.0, device="cuda")
    plan = HopperKernel().plan(scene.batch, spec, invariant=invariant)
    for _ in range(2):  # twice: the second launch finds the counter put back
        plan.run(q, scene.k, scene.v, scale=scale, softcap=scene.softcap, sinks=scene.sinks, out=out, lse=lse)
    torch.cuda.synchronize()
    assert (out[rows:] == 777.0).all(), "rows past the end were written"
    assert (lse[:, rows:] == 777.0).all(), "lse past the end was written"
    return out[:rows], lse[:, :rows]


def check(scene, scale=None, invariant=False):
    """Hold the kernel against the answer; returns the error."""
    scale = scene.spec.head_dim**-0.5 if scale is None else scale
    out, lse = run(scene, scale, invariant=invariant)
    want, want_lse = answer(scene, scale)
    assert not torch.isnan(out).any(), "NaN in out"
    error = (out.float() - want).abs().max().item() if out.numel() else 0.0
    largest = max(1.0, want.abs().max().item()) if out.numel() else 1.0
    limit = (2e-2 if scene.spec.dtype == torch.bfloat16 else 4e-3) * largest
    assert error < limit, f"out is off by {error}"
    same = (lse == -math.inf) == (want_lse == -math.inf)
    assert same.all(), "empty rows differ"
    finite = want_lse > -math.inf
    if finite.any():
        lse_error = (lse - want_lse)[finite].abs().max().item()
        assert lse_error < 2e-3 * max(1.0, want_lse[finite].abs().max().item()), f"lse is off by {lse_error}"
    return error
