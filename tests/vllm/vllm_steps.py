"""A step of the core's test support in vLLM's words: its metadata, its KV cache, a layer and a builder over it."""

from __future__ import annotations

import types

import torch
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from fa4_core.testing import make_step
from fa4_vllm.backend import FA4Backend

HEADS, KV_HEADS, DIM = 6, 2, 32
Q, KV = [1, 1, 40, 7, 1], [30, 17, 40, 50, 1]

ONE = torch.ones(())
AS_LAYER = types.SimpleNamespace(
    _q_scale=ONE, _k_scale=ONE.clone(), _v_scale=ONE.clone()
)  # what the stock impl reads off a layer
FIVE_D = hasattr(AttentionBackend, "get_kv_cache_shape")  # 0.25.1, where a backend chooses the cache's shape


def layer(**extra):
    """An impl of whichever class the backend names."""
    window = extra.pop("sliding_window", None)
    softcap = extra.pop("logits_soft_cap", None)
    positional = (HEADS, DIM, DIM**-0.5, KV_HEADS, None, window, "auto", softcap, "decoder", None)
    return FA4Backend.get_impl_cls()(*positional, **extra)


def step_of(impl, page_size=16, spare_rows=0, q=Q, kv=KV, seed=0):
    softcap = impl.fa4.softcap
    return make_step(impl.fa4.spec, q, kv, page_size=page_size, spare_rows=spare_rows, softcap=softcap, seed=seed)


def empty_kv_cache(pages, page_size, layout="NHD", *, kv_heads=KV_HEADS, dim=DIM, dtype=torch.float32, device="cpu"):
    """A cache of NaN as this version's runner allocates it for our backend, heads or rows first in memory."""
    if FIVE_D:
        shape = FA4Backend.get_kv_cache_shape(pages, page_size, kv_heads, dim)
        order = {"NHD": (0, 1, 2, 3, 4), "HND": (0, 1, 3, 2, 4)}[layout]
        back = [order.index(i) for i in range(5)]
        return torch.full([shape[i] for i in order], torch.nan, dtype=dtype, device=device).permute(back)
    if layout == "NHD":
        shape = (pages, page_size, kv_heads, 2 * dim)
        return torch.full(shape, torch.nan, dtype=dtype, device=device).transpose(1, 2)
    return torch.full((pages, kv_heads, page_size, 2 * dim), torch.nan, dtype=dtype, device=device)


def halves(kv_cache):
    """Its keys and its values, each [pages, page_size, kv_heads, head_dim]."""
    if FIVE_D:
        return kv_cache[:, 0], kv_cache[:, 1]
    return kv_cache[..., :DIM].transpose(1, 2), kv_cache[..., DIM:].transpose(1, 2)


def kv_cache_of(step, layout="NHD"):
    """The step's pages as vLLM hands them over."""
    kv_cache = empty_kv_cache(*step.k_pages.shape[:2], layout)
    for view, pages in zip(halves(kv_cache), (step.k_pages, step.v_pages)):
        view.copy_(pages)
    return kv_cache


def metadata_of(step, padding=0, **changes):
    """vLLM's account of the step, padded with requests of no query as full CUDA graphs have it."""
    starts = torch.cat([step.batch.cu_seqlens_q, step.batch.cu_seqlens_q[-1:].expand(padding)])
    lens = torch.cat([step.batch.kv_lens, step.batch.kv_lens.new_zeros(padding)])
    table = step.batch.page_table
    fields = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts.clone(),
        "seq_lens": lens,
        "seq_lens_cpu_upper_bound": lens + 3,  # optimistic, as for speculative rows
        "num_reqs": len(lens),
        "num_actual_tokens": int(starts[-1]),
        "max_query_len": int((starts[1:] - starts[:-1]).max()),
        "max_seq_len": 1024,
        "block_table_tensor": torch.cat([table, table.new_full((padding, table.shape[1]), -1)]),
        "slot_mapping": torch.zeros(int(starts[-1]), dtype=torch.int64),
        "causal": True,
    }
    return CommonAttentionMetadata(**{**fields, **changes})


def builder_of(config, page_size=16, layer_names=(), spec=FullAttentionSpec, device="cpu", **more):
    made = spec(block_size=page_size, num_kv_heads=KV_HEADS, head_size=DIM, dtype=torch.float32, **more)
    return FA4Backend.get_builder_cls()(made, list(layer_names), config, torch.device(device))


def forward(impl, step, metadata, layout="NHD"):
    """The impl's answer to the step, NaN where it wrote nothing."""
    output = torch.full((step.q.shape[0], HEADS, DIM), torch.nan)
    assert impl.forward(AS_LAYER, step.q, None, None, kv_cache_of(step, layout), metadata, output) is output
    return output


def assert_is_oracle(output, step):
    torch.testing.assert_close(output.double(), step.oracle()[0], atol=2e-6, rtol=2e-6, equal_nan=True)
