"""vLLM's words into ours: a step's metadata into a PrefillBatch, a layer's arguments into a LayerSpec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from fa4_core import LayerSpec, PrefillBatch, UnsupportedError
from fa4_core.page_table import from_block_table

from . import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata

CACHE_DTYPES = {"auto": None, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""What --kv-cache-dtype may be, and the type that it means; None is the model's own."""


def require_causal(metadata: CommonAttentionMetadata) -> None:
    """Raises ValueError where a step does not attend causally, or only some of its requests do."""
    if metadata.causal is not True:
        raise ValueError(f"causal was {metadata.causal}; allowed: True")


def batch(metadata: CommonAttentionMetadata, page_size: int, config: VllmConfig, *, first: int = 0) -> PrefillBatch:
    """A step over one KV-cache group.

    Args:
        metadata: The step. Its requests may be padded with ones of no query.
        page_size: Rows of a page of the group.
        config: The engine's.
        first: Leave out the requests before this one, and their rows.

    Raises:
        ValueError: A step that does not attend causally.
    """
    require_causal(metadata)
    requests = slice(first, metadata.num_reqs)
    bounds = slice(first, metadata.num_reqs + 1)
    starts = metadata.query_start_loc_cpu[bounds]
    cu_seqlens_q = metadata.query_start_loc[bounds]
    host_kv_lens = compat.host_kv_lens(metadata, config)
    return PrefillBatch(
        cu_seqlens_q - int(starts[0]) if first else cu_seqlens_q,  # the host's query lengths are exact
        metadata.seq_lens[requests],
        from_block_table(metadata.block_table_tensor[requests]),
        page_size,
        host_q_lens=starts[1:] - starts[:-1],
        host_kv_lens=None if host_kv_lens is None else host_kv_lens[requests],
        max_kv_len=metadata.max_seq_len,
    )


def with_table(of: PrefillBatch, block_table: torch.Tensor, page_size: int) -> PrefillBatch:
    """The same requests over another KV-cache group.

    Args:
        of: The batch over the first group.
        block_table: Integers [requests and more, P].
        page_size: Rows of a page of the new group.
    """
    return of.with_pages(from_block_table(block_table[: of.num_requests]), page_size)


def leading(metadata: CommonAttentionMetadata, requests: int, tokens: int) -> CommonAttentionMetadata:
    """The first requests of a step alone, in vLLM's words.

    Args:
        metadata: The step.
        requests: How many, at least 1.
        tokens: Their query rows.
    """
    starts = metadata.query_start_loc_cpu[: requests + 1]
    # vLLM's own way to leave out the last requests keeps the longest query, which was a prefill row's.
    return metadata.unpadded(tokens, requests).replace(max_query_len=int((starts[1:] - starts[:-1]).max()))


def spec(
    num_heads: int, head_size: int, num_kv_heads: int, sliding_window: int | None, kv_cache_dtype: str,
    softcap: bool, sinks: bool, dtype: torch.dtype,
) -> LayerSpec:  # fmt: skip
    """A layer, from its impl's arguments and the model's dtype.

    Raises:
        ValueError: A cache type that is not served.
    """
    if kv_cache_dtype not in CACHE_DTYPES:
        raise ValueError(f"kv_cache_dtype was {kv_cache_dtype!r}; allowed: {', '.join(CACHE_DTYPES)}")
    return LayerSpec(
        num_heads,
        num_kv_heads,
        head_size,
        dtype=dtype,
        kv_dtype=CACHE_DTYPES[kv_cache_dtype] or dtype,
        # vLLM counts the query's own key into its window.
        window=(None if sliding_window is None else sliding_window - 1, None),
        softcap=softcap,
        sinks=sinks,
    )


def refuse(arguments: dict[str, Any], config: VllmConfig) -> None:
    """Refuse what vLLM's own questions to a backend do not cover.

    Args:
        arguments: The impl's arguments that change what attention means, by name; unknown ones among them.
        config: The engine's.

    Raises:
        UnsupportedError: All that stands against the layer, one reason a line.
    """
    reasons = {}
    if arguments.pop("alibi_slopes") is not None:
        reasons["ALiBi"] = "positions encoded in the scores are not served"
    attn_type = arguments.pop("attn_type")
    if attn_type != "decoder":
        reasons[f"attention type {attn_type}"] = "only a decoder's causal attention is served"
    if arguments.pop("kv_sharing_target_layer_name") is not None:
        reasons["KV sharing"] = "a layer that reads another's cache has not been tried with this backend"
    for name, value in arguments.items():
        if value is not None and value is not False:
            reasons[name] = "an argument that this backend does not know; without it the answer could be wrong"
    if config.model_config.rswa_window is not None:
        # From 0.32 on vLLM asks the backend; 0.25.1 does not, and would have the prompt drop out of the window.
        reasons["reference sliding window attention"] = "a prompt that stays in sight of every query is no window"
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1:
        reasons["decode context parallelism"] = "a request's keys are split over ranks, which is not served"
    if parallel.prefill_context_parallel_size > 1:
        reasons["prefill context parallelism"] = "a request's queries are split over ranks, which is not served"
    if reasons:
        raise UnsupportedError("this layer through --attention-backend CUSTOM", reasons)


def refuse_group(kv_cache_spec: Any) -> None:
    """Refuse the KV-cache groups for which vLLM wraps a backend's builder, or keeps keys in an order of its own.

    It tells the backend nothing else of them, and what the wrappers change they do not always tell the host: static
    sinks make every request longer and leave the host's lengths as they were.

    Raises:
        UnsupportedError: All that stands against the group, one reason a line.
    """
    reasons = {}
    if type(kv_cache_spec) not in (FullAttentionSpec, SlidingWindowSpec):
        reasons[type(kv_cache_spec).__name__] = "allowed: FullAttentionSpec, SlidingWindowSpec"
    # A full spec too has a chunk where vLLM's hybrid KV-cache manager is off.
    if getattr(kv_cache_spec, "attention_chunk_size", None):
        reasons["chunked local attention"] = "its mask is no window"
    if reasons:
        raise UnsupportedError("these layers through --attention-backend CUSTOM", reasons)
