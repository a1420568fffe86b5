"""A layer's attention, whichever of vLLM's classes it is under: what it is, what is refused, its prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform

from fa4_core import LayerSpec, PrefillBatch, Question, Target, counters, prefill, select, startup

from . import compat, translate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Layer:
    """What vLLM says of a layer when it builds its attention, found to be served.

    Args:
        num_heads: Query heads on this rank.
        head_size: Elements of a head.
        scale: Of the scores.
        num_kv_heads: Key heads on this rank.
        sliding_window: Keys that a query sees, its own included; None is all.
        kv_cache_dtype: "auto", "float16" or "bfloat16".
        softcap: 0 is none.
        sinks: [num_heads], bfloat16 or float32, or None.
        spec: The same in the core's words.
        invariant: The core's invariant setting.
    """

    num_heads: int
    head_size: int
    scale: float
    num_kv_heads: int
    sliding_window: int | None
    kv_cache_dtype: str
    softcap: float
    sinks: torch.Tensor | None
    spec: LayerSpec
    invariant: bool

    @classmethod
    def of(
        cls, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None, sinks: torch.Tensor | None = None, **extra: Any,
    ) -> Layer:  # fmt: skip
        """From the arguments of vLLM's AttentionImpl.

        Args:
            num_heads: As above, and so all that are not named here.
            head_size: As above.
            scale: As above.
            num_kv_heads: None means num_heads.
            alibi_slopes: Refused.
            sliding_window: As above.
            kv_cache_dtype: As above.
            logits_soft_cap: None or 0 is none.
            attn_type: "decoder"; others are refused.
            kv_sharing_target_layer_name: Refused.
            sinks: As above.
            **extra: Refused unless None or False.

        Raises:
            UnsupportedError: The layer is not served, by this backend or by any kernel on this device.
            ValueError: A cache type that is not served.
        """
        config = get_current_vllm_config()
        meaning = {
            "alibi_slopes": alibi_slopes,
            "attn_type": attn_type,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
        }
        translate.refuse(meaning | extra, config)
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        softcap = logits_soft_cap or 0.0
        spec = translate.spec(
            num_heads, head_size, kv_heads, sliding_window, kv_cache_dtype, softcap > 0,
            sinks is not None, config.model_config.dtype,
        )  # fmt: skip
        invariant = bool(envs.VLLM_BATCH_INVARIANT)
        # Refused here, where vLLM still says which layer it is building, and before it loads any weight.
        select(Question(spec, None, Target.of(torch.device(current_platform.device_type)), invariant))
        return cls(
            num_heads, head_size, float(scale), kv_heads,
            sliding_window, kv_cache_dtype, softcap, sinks, spec, invariant,
        )  # fmt: skip

    def prefill(self, query: torch.Tensor, kv_cache: torch.Tensor, batch: PrefillBatch, output: torch.Tensor) -> None:
        """Attention of a batch over the layer's cache.

        Args:
            query: [tokens, num_heads, head_size].
            kv_cache: The layer's cache, as vLLM hands it over.
            batch: Whose rows they are.
            output: [tokens, num_heads, head_size]; written.
        """
        prefill(
            query, *compat.split_kv_cache(kv_cache, self.head_size), batch, self.spec,
            scale=self.scale, softcap=self.softcap, sinks=self.sinks, out=output, invariant=self.invariant,
        )  # fmt: skip

    def profile(self, kv_cache: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """What a layer does where there is no step: take the workspace while vLLM measures memory, else nothing.

        Args:
            kv_cache: Empty while memory is measured, which is before the KV pool is sized.
            output: Filled with 0.

        Returns:
            output.
        """
        # vLLM also runs without a step when it captures the graphs around attention. That is on another stream, and
        # memory taken there would be a second workspace, which the KV pool has not been sized with.
        if not kv_cache.numel():
            # The page size may still change; a workspace that serves any is held then.
            startup.reserve([self.spec], page_size=None, device=output.device, invariant=self.invariant)
        return output.fill_(0)


def refuse_quantised_output(*scales: torch.Tensor | None) -> None:
    """Raises ValueError where vLLM asks a layer for a quantised output."""
    if any(scale is not None for scale in scales):
        raise ValueError("output_scale or output_block_scale was given; allowed: None, outputs are not quantised")


def start(kv_cache_spec: Any, layer_names: Iterable[str], config: VllmConfig, device: torch.device) -> None:
    """What is done once a KV-cache group, when its metadata builder is made: say in the log what runs.

    Raises:
        UnsupportedError: The layers are not served, or by no kernel on pages of this size.
    """
    translate.refuse_group(kv_cache_spec)
    compat.share_logging()
    compat.warn_if_untested()
    layers = config.compilation_config.static_forward_context
    specs = [layers[name].impl.fa4.spec for name in layer_names]
    startup.start(
        "vllm", compat.version(), specs,
        page_size=kv_cache_spec.block_size, device=device, invariant=bool(envs.VLLM_BATCH_INVARIANT),
    )  # fmt: skip


def count(tokens: int) -> None:
    """Count a step's query rows that go to prefill(), once a KV-cache group.

    Counted by the builders and not by the layers, so that a layer which never came through prefill() shows.
    """
    counters.add("vllm.steps")
    counters.add("vllm.scheduled_tokens", tokens)
