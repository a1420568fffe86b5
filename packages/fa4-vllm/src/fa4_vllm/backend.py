"""vLLM's attention interface over fa4_core.prefill(): what is served, a step's metadata, a layer's attention.

The classes here send every row through prefill(): on a CPU, and on CUDA in the invariant setting. On CUDA otherwise
the impl and the builder are those of split.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)

from fa4_core import PrefillBatch
from fa4_core.page_table import write_slots

from . import compat, translate
from .layer import Layer, count, refuse_quantised_output, start

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def splits() -> bool:
    """Whether decode rows go to vLLM's own FlashAttention: on CUDA, except in the invariant setting.

    That setting promises a row the same bits whichever rows it is batched with, and a row with a query of its own
    may be called decode in one step and prefill in the next: two kernels cannot keep the promise.
    """
    return current_platform.is_cuda() and not envs.VLLM_BATCH_INVARIANT


class FA4Backend(compat.BackendHooks):
    """What vLLM may ask before it builds a layer. Anything new that it learns to ask, it inherits as a no.

    It is no subclass of the stock backend, whose permissions it would inherit. Where decode rows go there, the
    stock backend is asked as well and its refusals are ours.
    """

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(translate.CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's list of backends that we stand for."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """A layer's attention."""
        if splits():
            from .split import SplitImpl

            return SplitImpl
        return FA4Impl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """A step's metadata."""
        if splits():
            from .split import SplitMetadataBuilder

            return SplitMetadataBuilder
        return FA4MetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Any page size; vLLM's writer of CUDA caches wants multiples of 16, its own kernel perhaps one size alone."""
        if splits():
            return compat.stock_block_sizes(kv_cache_spec)
        return [MultipleOf(1 if current_platform.is_cpu() else 16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """The stock backend's, where it has a part."""
        if splits():
            return compat.stock().get_preferred_block_size(default_block_size)
        return super().get_preferred_block_size(default_block_size)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Any that the kernels serve, which select() asks."""
        return not splits() or compat.stock().supports_head_size(head_size)

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        """float32 too on a CPU, where the reference serves it."""
        return dtype in cls.supported_dtypes or (dtype == torch.float32 and current_platform.is_cpu())

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Any that the kernels serve, which select() asks and says why where none does."""
        return not splits() or compat.stock().supports_compute_capability(capability)

    @classmethod
    def supports_combination(cls, *args: Any, **kwargs: Any) -> str | None:
        """None, or why the stock backend does not serve this combination."""
        return compat.stock().supports_combination(*args, **kwargs) if splits() else None

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Served."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Served."""
        return not splits() or compat.stock().supports_sink()

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Served: VLLM_BATCH_INVARIANT selects the core's invariant setting."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Not served: the host's query lengths must be upper bounds of the device's."""
        return False


@dataclass
class FA4Metadata(AttentionMetadata):
    """A step over one KV-cache group, shared by the group's layers.

    Args:
        batch: The step.
        num_actual_tokens: Rows of query and output that belong to it; those after are padding.
        slot_mapping: Integers [tokens], where each new token's key and value go; -1 nowhere.
    """

    batch: PrefillBatch
    num_actual_tokens: int
    slot_mapping: torch.Tensor


class FA4MetadataBuilder(AttentionMetadataBuilder[FA4Metadata]):
    """Makes a step's metadata; made once a KV-cache group when the engine starts."""

    # A step's plan is made by the host, so attention stays out of CUDA graphs; vLLM then graphs all that surrounds it.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    supports_update_block_table = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        start(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FA4Metadata:
        """Translate a step; nothing is copied from the device.

        Raises:
            ValueError: A step that does not attend causally.
        """
        metadata = common_attn_metadata
        count(metadata.num_actual_tokens)
        batch = translate.batch(metadata, self.kv_cache_spec.block_size, self.vllm_config)
        return FA4Metadata(batch, metadata.num_actual_tokens, metadata.slot_mapping)

    def update_block_table(
        self, metadata: FA4Metadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> FA4Metadata:
        """The same step over another group's pages."""
        count(metadata.num_actual_tokens)
        batch = translate.with_table(metadata.batch, blk_table, self.kv_cache_spec.block_size)
        return replace(metadata, batch=batch, slot_mapping=slot_mapping)


class FA4Impl(AttentionImpl[FA4Metadata]):
    """One layer's attention.

    Args:
        *args: Those of vLLM's AttentionImpl, as `Layer.of` describes them.
        **kwargs: Likewise.

    Raises:
        UnsupportedError: The layer is not served, by this backend or by any kernel on this device.
        ValueError: A cache type that is not served.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.fa4 = Layer.of(*args, **kwargs)
        # vLLM reads these off every impl.
        self.num_heads, self.head_size, self.scale = self.fa4.num_heads, self.fa4.head_size, self.fa4.scale
        self.num_kv_heads, self.kv_cache_dtype = self.fa4.num_kv_heads, self.fa4.kv_cache_dtype
        self.sinks = self.fa4.sinks

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:  # fmt: skip
        """Write a step's new keys and values, [tokens, kv_heads, head_dim] each, where slot_mapping says."""
        k_pages, v_pages = compat.split_kv_cache(kv_cache, self.head_size)
        if current_platform.is_cuda():
            from vllm._custom_ops import reshape_and_cache_flash

            reshape_and_cache_flash(
                key, value, k_pages, v_pages, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale
            )
            return
        write_slots(k_pages, slot_mapping, key)
        write_slots(v_pages, slot_mapping, value)

    def forward(
        self, layer: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        kv_cache: torch.Tensor, attn_metadata: FA4Metadata | None, output: torch.Tensor,
        output_scale: torch.Tensor | None = None, output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of a step's rows over the layer's cache, into output.

        Args:
            layer: The layer; not read.
            query: [tokens, num_heads, head_size]; rows past the step's are padding.
            key: Written to the cache already.
            value: Likewise.
            kv_cache: The layer's cache; empty while vLLM measures memory.
            attn_metadata: The step; None while vLLM measures memory or captures the graphs around attention.
            output: [tokens, num_heads, head_size].
            output_scale: Refused.
            output_block_scale: Refused.

        Returns:
            output; rows past the step's are left as they are.

        Raises:
            ValueError: vLLM asks for a quantised output.
        """
        refuse_quantised_output(output_scale, output_block_scale)
        if attn_metadata is None:
            return self.fa4.profile(kv_cache, output)
        n = attn_metadata.num_actual_tokens
        self.fa4.prefill(query[:n], kv_cache, attn_metadata.batch, output[:n])
        return output
