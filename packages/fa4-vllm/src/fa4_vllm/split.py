"""CUDA: decode rows go to vLLM's own FlashAttention as it is, prefill rows to fa4_core.prefill().

A step of decode rows alone is the stock backend's, untouched: its builder makes the metadata from vLLM's own account
of the step, so full CUDA graphs are captured and replayed as they would be without us. In a mixed step the stock
builder is called once, for the decode rows: what it computes ahead describes a whole batch and lies in one
persistent buffer, so neither a slice of it nor a second one would do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from fa4_core import PrefillBatch

from . import translate
from .layer import Layer, count, refuse_quantised_output, start

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass
class SplitMetadata(AttentionMetadata):
    """A step with prefill rows in it, over one KV-cache group; one without is a plain FlashAttentionMetadata.

    Args:
        decode: The first rows, as the stock builder describes them; None where there are none.
        num_decodes: Their requests.
        num_decode_tokens: Their rows.
        prefill: The rows after them.
        num_actual_tokens: All rows of query and output that belong to the step; those after are padding.
        slot_mapping: Integers [tokens], where each new token's key and value go; -1 nowhere.
    """

    decode: FlashAttentionMetadata | None
    num_decodes: int
    num_decode_tokens: int
    prefill: PrefillBatch
    num_actual_tokens: int
    slot_mapping: torch.Tensor


class SplitMetadataBuilder(FlashAttentionMetadataBuilder):
    """The stock builder for decode rows, ours for prefill rows; made once a KV-cache group when the engine starts."""

    # Full graphs hold decode rows alone, and those never meet prefill(), whose plan is made by the host.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        # The stock builder offers to refresh a captured draft step in place; not tried with ours around it.
        self.supports_draft_decode_metadata_update = False
        start(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashAttentionMetadata | SplitMetadata:
        """A step's metadata; nothing is copied from the device.

        Rows are decode while they lead the batch with no more queries than a decode step of a draft model has.
        vLLM orders its batches so; a short row that comes later is prefill, which serves it as well.

        Raises:
            ValueError: A step that does not attend causally.
        """
        step = common_attn_metadata
        translate.require_causal(step)
        decodes, prefills, tokens, prefill_tokens = split_decodes_and_prefills(step, self.reorder_batch_threshold)
        if not prefills:
            return super().build(common_prefix_len, step, fast_build)
        if not tokens:
            decodes = 0  # requests of no query may lead, and there is nothing to decode in them
        decode = super().build(0, translate.leading(step, decodes, tokens), fast_build) if decodes else None
        count(prefill_tokens)
        batch = translate.batch(step, self.kv_cache_spec.block_size, self.vllm_config, first=decodes)
        return SplitMetadata(decode, decodes, tokens, batch, step.num_actual_tokens, step.slot_mapping)

    def update_block_table(
        self, metadata: FlashAttentionMetadata | SplitMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> FlashAttentionMetadata | SplitMetadata:
        """The same step over another group's pages."""
        if not isinstance(metadata, SplitMetadata):
            return super().update_block_table(metadata, blk_table, slot_mapping)
        decode, n = metadata.decode, metadata.num_decodes
        if decode is not None:
            decode = super().update_block_table(decode, blk_table[:n], slot_mapping[: metadata.num_decode_tokens])
        count(metadata.num_actual_tokens - metadata.num_decode_tokens)
        batch = translate.with_table(metadata.prefill, blk_table[n:], self.kv_cache_spec.block_size)
        return replace(metadata, decode=decode, prefill=batch, slot_mapping=slot_mapping)

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        """Not served: it takes a whole step, prefill rows too. Asked by 0.25.1 alone."""
        return False


class SplitImpl(FlashAttentionImpl):
    """One layer's attention; the cache is written as the stock impl writes it.

    Args:
        *args: Those of vLLM's AttentionImpl, as `Layer.of` describes them.
        **kwargs: Likewise.

    Raises:
        UnsupportedError: The layer is not served, by this backend or by any kernel on this device.
        ValueError: A cache type that is not served.
    """

    # Permissions that the stock impl has, or may come to have, and prefill() does not share.
    can_return_lse_for_decode = False
    supports_pcp = False
    supports_dcp = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.fa4 = at = Layer.of(*args, **kwargs)
        super().__init__(
            at.num_heads, at.head_size, at.scale, at.num_kv_heads, None, at.sliding_window, at.kv_cache_dtype,
            at.softcap or None, sinks=at.sinks,
        )  # fmt: skip
        self.supports_quant_query_input = False

    def forward(
        self, layer: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        kv_cache: torch.Tensor, attn_metadata: FlashAttentionMetadata | SplitMetadata | None, output: torch.Tensor,
        output_scale: torch.Tensor | None = None, output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of a step's rows over the layer's cache, into output; the arguments are those of `FA4Impl`.

        Raises:
            ValueError: vLLM asks for a quantised output.
        """
        refuse_quantised_output(output_scale, output_block_scale)
        if attn_metadata is None:
            return self.fa4.profile(kv_cache, output)
        if not isinstance(attn_metadata, SplitMetadata):
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output)
        if attn_metadata.decode is not None:
            super().forward(layer, query, key, value, kv_cache, attn_metadata.decode, output)
        rows = slice(attn_metadata.num_decode_tokens, attn_metadata.num_actual_tokens)
        self.fa4.prefill(query[rows], kv_cache, attn_metadata.prefill, output[rows])
        return output
