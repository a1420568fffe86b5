"""vLLM's attention interface over fa4_core.prefill(): what is served, a step's metadata, a layer's attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

from fa4_core import LayerSpec, PrefillBatch, Question, Target, UnsupportedError, counters, prefill, select, startup

from . import compat, translate

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class FA4Backend(AttentionBackend):
    """What vLLM may ask before it builds a layer. Anything new that it learns to ask, it inherits as a no."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(translate.CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's list of backends that we stand for."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FA4Impl]:
        """A layer's attention."""
        return FA4Impl

    @staticmethod
    def get_builder_cls() -> type[FA4MetadataBuilder]:
        """A step's metadata."""
        return FA4MetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Any page size; vLLM's writer of CUDA caches wants multiples of 16."""
        return [MultipleOf(1 if current_platform.is_cpu() else 16)]

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        """float32 too on a CPU, where the reference serves it."""
        return dtype in cls.supported_dtypes or (dtype == torch.float32 and current_platform.is_cpu())

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Served."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Served."""
        return True

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
        # vLLM wraps any backend's builder for these layers and tells the backend nothing else.
        if isinstance(kv_cache_spec, ChunkedLocalAttentionSpec):
            reason = {"chunked local attention": "its mask is no window"}
            raise UnsupportedError("these layers through --attention-backend CUSTOM", reason)
        compat.share_logging()
        compat.warn_if_untested()
        layers = vllm_config.compilation_config.static_forward_context
        specs = [layers[name].impl.spec for name in layer_names if name in layers]
        startup.start(
            "vllm", compat.version(), specs,
            page_size=kv_cache_spec.block_size, device=device, invariant=bool(envs.VLLM_BATCH_INVARIANT),
        )  # fmt: skip

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FA4Metadata:
        """Translate a step; nothing is copied from the device.

        Raises:
            ValueError: A step that does not attend causally.
        """
        metadata = common_attn_metadata
        # Counted here and not in the layers, so that a layer which never came through prefill() shows.
        counters.add("vllm.steps")
        counters.add("vllm.scheduled_tokens", metadata.num_actual_tokens)
        batch = translate.batch(metadata, self.kv_cache_spec.block_size)
        return FA4Metadata(batch, metadata.num_actual_tokens, metadata.slot_mapping)

    def update_block_table(
        self, metadata: FA4Metadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> FA4Metadata:
        """The same step over another group's pages."""
        counters.add("vllm.steps")
        counters.add("vllm.scheduled_tokens", metadata.num_actual_tokens)
        table = translate.from_block_table(blk_table[: metadata.batch.num_requests])
        batch = metadata.batch.with_pages(table, self.kv_cache_spec.block_size)
        return replace(metadata, batch=batch, slot_mapping=slot_mapping)


class FA4Impl(AttentionImpl[FA4Metadata]):
    """One layer's attention.

    Args:
        num_heads: Query heads on this rank.
        head_size: Elements of a head.
        scale: Of the scores.
        num_kv_heads: Key heads on this rank; None means num_heads.
        alibi_slopes: Refused.
        sliding_window: Keys that a query sees, its own included; None is all.
        kv_cache_dtype: "auto", "float16" or "bfloat16".
        logits_soft_cap: None or 0 is none.
        attn_type: "decoder"; others are refused.
        kv_sharing_target_layer_name: Refused.
        sinks: [num_heads], bfloat16 or float32.
        **extra: Refused unless None or False.

    Raises:
        UnsupportedError: The layer is not served, by this backend or by any kernel on this device.
        ValueError: A cache type that is not served.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **extra: Any,
    ) -> None:
        config = get_current_vllm_config()
        meaning = {
            "alibi_slopes": alibi_slopes,
            "attn_type": attn_type,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
        }
        translate.refuse(meaning | extra, config)
        # vLLM reads these off every impl.
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.sinks = sinks
        self.softcap = logits_soft_cap or 0.0
        self.invariant = bool(envs.VLLM_BATCH_INVARIANT)
        self.spec: LayerSpec = translate.spec(
            num_heads, head_size, self.num_kv_heads, sliding_window, kv_cache_dtype, self.softcap > 0,
            sinks is not None, config.model_config.dtype,
        )  # fmt: skip
        # Refused here, where vLLM still says which layer it is building, and before it loads any weight.
        target = Target.of(torch.device(current_platform.device_type))
        select(Question(self.spec, None, target, self.invariant))

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write a step's new keys and values, [tokens, kv_heads, head_dim] each, where slot_mapping says."""
        k_pages, v_pages = compat.split_kv_cache(kv_cache, self.head_size)
        if kv_cache.device.type == "cuda":
            from vllm._custom_ops import reshape_and_cache_flash

            reshape_and_cache_flash(
                key, value, k_pages, v_pages, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale
            )
            return
        written = slot_mapping >= 0
        slots = slot_mapping[written]
        place = (slots // k_pages.shape[1], slots % k_pages.shape[1])
        for pages, rows in ((k_pages, key), (v_pages, value)):
            pages[place] = rows[: len(slot_mapping)][written].to(pages.dtype)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FA4Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of a step's rows over the layer's cache, into output.

        Args:
            layer: The layer; not read.
            query: [tokens, num_heads, head_size]; rows past the step's are padding.
            key: Written to the cache already.
            value: Likewise.
            kv_cache: The layer's cache.
            attn_metadata: The step; None while vLLM measures memory.
            output: [tokens, num_heads, head_size].
            output_scale: Refused.
            output_block_scale: Refused.

        Returns:
            output; rows past the step's are left as they are.

        Raises:
            ValueError: vLLM asks for a quantised output.
        """
        if output_scale is not None or output_block_scale is not None:
            raise ValueError("output_scale or output_block_scale was given; allowed: None, outputs are not quantised")
        if attn_metadata is None:
            return output.fill_(0)
        n = attn_metadata.num_actual_tokens
        prefill(
            query[:n], *compat.split_kv_cache(kv_cache, self.head_size), attn_metadata.batch, self.spec,
            scale=self.scale, softcap=self.softcap, sinks=self.sinks, out=output[:n], invariant=self.invariant,
        )  # fmt: skip
        return output
