"""SGLang's words into fa4_core's: ForwardBatch to PrefillBatch, RadixAttention to LayerSpec, pools to pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fa4_core import LayerSpec, PrefillBatch
from fa4_core.page_table import from_token_slots

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

SINKS = ("sinks", "attention_sink_bias")
"""Where models keep a layer's sinks, which reach its backend only with a call."""


@dataclass(frozen=True)
class Step:
    """A step as the backend keeps it for its layers.

    Args:
        batch: Over the pool that a model's layers share.
        tokens: Query rows that belong to a request, as the host counts them.
        window_batch: Over the second pool, of sliding-window layers; None where there is none.
        window_slots: [rows], where a step's new keys go in the second pool; None likewise.
    """

    batch: PrefillBatch
    tokens: int
    window_batch: PrefillBatch | None = None
    window_slots: torch.Tensor | None = None


def step(
    forward_batch: ForwardBatch, req_to_token: torch.Tensor, pool: MHATokenToKVPool | SWAKVPool, page_size: int
) -> Step:
    """A forward batch of any served mode; prefill and decode rows differ in nothing but their number.

    Args:
        forward_batch: EXTEND, MIXED, DECODE or IDLE.
        req_to_token: int32 [requests, context], a slot for each token.
        pool: One that `limits.check` lets pass.
        page_size: Rows of a page.

    Raises:
        ValueError: Another mode, or scoring with several items in a request.
    """
    mode = forward_batch.forward_mode
    if mode.name not in ("EXTEND", "MIXED", "DECODE", "IDLE"):
        raise ValueError(f"forward_mode was {mode.name}; allowed: EXTEND, MIXED, DECODE, IDLE")
    if getattr(forward_batch, "multi_item_delimiter_indices", None) is not None:
        raise ValueError("multi_item_delimiter_indices was given; allowed: None, items of a request see each other")
    kv_lens = forward_batch.seq_lens.to(torch.int32)
    if mode.is_decode_or_idle():
        q_lens = torch.ones_like(kv_lens)
        host_q_lens = [1] * kv_lens.shape[0]
    else:
        q_lens = forward_batch.extend_seq_lens.to(torch.int32)
        host_q_lens = forward_batch.extend_seq_lens_cpu
    # The host's lengths are never fetched from the device: where it has none, the request's longest context bounds.
    host_kv_lens = forward_batch.seq_lens_cpu
    longest = req_to_token.shape[1]
    if host_kv_lens is not None:
        # A bound may be optimistic, past the end of the context; no request is.
        longest = min(longest, int(host_kv_lens.max()) if host_kv_lens.numel() else 0)

    def table(twins: torch.Tensor | None) -> torch.Tensor:
        requests = forward_batch.req_pool_indices
        return from_token_slots(req_to_token, requests, page_size=page_size, max_kv_len=longest, twins=twins)

    batch = PrefillBatch(
        torch.nn.functional.pad(torch.cumsum(q_lens, 0, dtype=torch.int32), (1, 0)),
        kv_lens,
        table(None),
        page_size,
        host_q_lens=host_q_lens,
        host_kv_lens=host_kv_lens,
        max_kv_len=longest,
    )
    tokens = forward_batch.extend_num_tokens if host_q_lens is None else sum(host_q_lens)
    if not window_layers(pool):
        return Step(batch, tokens)
    twins = pool.full_to_swa_index_mapping
    slots = pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc)
    return Step(batch, tokens, batch.with_pages(table(twins)), slots)


def window_layers(pool: MHATokenToKVPool | SWAKVPool) -> frozenset[int]:
    """Ids of the layers whose keys lie in a second pool, which SGLang makes for sliding windows."""
    mapping = getattr(pool, "layers_mapping", {})
    return frozenset(layer for layer, (_, windowed) in mapping.items() if windowed)


def spec(layer: RadixAttention, dtype: torch.dtype, kv_dtype: torch.dtype, sinks: bool) -> LayerSpec:
    """A layer that `limits.refuse_layer` lets pass."""
    window = layer.sliding_window_size  # keys before a query's own that it sees, or -1; never the query's own
    return LayerSpec(
        q_heads=layer.tp_q_head_num,
        kv_heads=layer.tp_k_head_num,
        head_dim=layer.qk_head_dim,
        head_dim_v=layer.v_head_dim,
        dtype=dtype,
        kv_dtype=kv_dtype,
        window=(None if window is None or window < 0 else window, 0),
        softcap=bool(layer.logit_cap),
        sinks=sinks,
    )


def pages(
    pool: MHATokenToKVPool | SWAKVPool, layer: RadixAttention, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's keys and values, [pages, page_size, kv_heads, head_dim] each: views of the pool that it lies in.

    Asked for at each call, since the pool waits there for a layer that is still being loaded from the host.
    """
    k, v = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    return k.view(-1, page_size, *k.shape[1:]), v.view(-1, page_size, *v.shape[1:])


def layers(model: torch.nn.Module) -> Iterator[tuple[str, RadixAttention, bool]]:
    """Name, layer and whether it has sinks, of each attention layer of a model."""
    from sglang.srt.layers.radix_attention import RadixAttention

    for name, module in model.named_modules():
        sinks = any(isinstance(getattr(module, sink, None), torch.Tensor) for sink in SINKS)
        found = dict(module.named_children())
        # Models that SGLang takes from transformers keep their layers in a plain dict, which no walk of modules sees.
        found |= {str(i): layer for i, layer in (getattr(module, "attention_instances", None) or {}).items()}
        for child, layer in found.items():
            if isinstance(layer, RadixAttention):
                yield f"{name}.{child}".lstrip("."), layer, sinks
