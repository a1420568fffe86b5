"""What is not served, and why. SGLang asks its backends nothing, so the constructor finds out and refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fa4_core import UnsupportedError

from . import compat
from .plugin import NAME

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.model_runner import ModelRunner

# An option of the server, what it is when it is off, and why it is refused when it is on. A version
# that has no such option has it off; the tests say which options are missing where.
OPTIONS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("dcp_size", (1, None), "decode context parallelism splits a request's keys over ranks"),
    ("attn_cp_size", (1, None), "context parallelism splits a request's queries over ranks"),
    ("enable_kv_cache_sharding", (False, None), "sharding splits a request's keys over ranks"),
    ("enable_dp_attention", (False, None), "data-parallel attention has not been tried with this backend"),
    ("attn_dp_size", (1, None), "data-parallel attention has not been tried with this backend"),
    ("enable_two_batch_overlap", (False, None), "two-batch overlap has not been tried with this backend"),
    ("enable_pdmux", (False, None), "PD multiplexing has not been tried with this backend"),
    ("enable_unified_memory", (False, None), "the unified pool renumbers slots, which is not followed here"),
    ("enable_page_major_kv_layout", (False, None), "only token after token (nhd) is served"),
    ("dllm_algorithm", (None,), "diffusion language models attend in both directions within a block"),
)


def check(runner: ModelRunner, layers: dict[str, RadixAttention]) -> None:
    """Refuse a server that this backend would serve wrongly.

    Args:
        runner: With its model loaded and its pools made.
        layers: The model's attention layers, by name.

    Raises:
        UnsupportedError: All that stands against it, one reason a line.
    """
    reasons: dict[str, str] = {}
    for name, off, why in OPTIONS:
        value = compat.option(runner.server_args, name)
        if value not in off:
            reasons[f"--{name.replace('_', '-')} {value}"] = why
    reasons |= _speculation(runner.server_args)
    reasons |= _pools(runner.token_to_kv_pool)
    reasons |= _images(runner)
    if getattr(runner, "use_mla_backend", False):
        reasons["MLA"] = "latent attention keeps no keys and values of its own to page"
    else:
        refused: dict[str, list[str]] = {}
        for name, layer in layers.items():
            why = refuse_layer(layer)
            if why is not None:
                refused.setdefault(why, []).append(name)
        for why, names in refused.items():
            reasons[names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")] = why
    if reasons:
        raise UnsupportedError(f"this model and these options through --prefill-attention-backend {NAME}", reasons)


def refuse_layer(layer: RadixAttention) -> str | None:
    """Why a layer's attention is not served; None where it is."""
    from sglang.srt.layers.radix_attention import AttentionType

    if layer.is_cross_attention:
        return "cross attention, whose keys are another sequence's"
    if layer.attn_type != AttentionType.DECODER:
        return f"attention of type {layer.attn_type.value}, which sees keys after its own position"
    if layer.use_irope:
        return "chunked local attention, whose mask is no window"
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        return f"scores capped by {layer.logit_capping_method!r}, not by tanh"
    if layer.pos_encoding_mode != "NONE":
        return f"positions encoded in the scores ({layer.pos_encoding_mode})"
    if layer.xai_temperature_len is not None and layer.xai_temperature_len > 0:
        return "a temperature that grows with the position"
    return None


def _pools(pool: Any) -> dict[str, str]:
    """A model's one pool, or the two of a model with sliding windows."""
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    # Subclasses keep keys in other ways (fp4, mxfp8, page-major, none at all), so types are compared, not kinds.
    if type(pool) is not SWAKVPool:
        return _pool(pool)
    if getattr(pool, "swa_req_ring_size", None) is not None:
        return {"SWAKVPool": "a ring of slots a request, which has no pages"}
    return _pool(pool.full_kv_pool) | _pool(pool.swa_kv_pool)


def _pool(pool: Any) -> dict[str, str]:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    if type(pool) is not MHATokenToKVPool:
        return {type(pool).__name__: "only pools of the kinds MHATokenToKVPool and SWAKVPool are served"}
    if pool.store_dtype != pool.dtype or pool.dtype.itemsize < 2:
        return {"--kv-cache-dtype": f"keys and values of type {pool.dtype} are not served; use auto"}
    if pool.kv_cache_layout != "nhd":
        return {"KV layout": f"{pool.kv_cache_layout} is not served, only token after token (nhd)"}
    return {}


def _images(runner: ModelRunner) -> dict[str, str]:
    """Gemma 3 and 4 write masks of their image tokens into backends that they know, and go on without in others."""
    model = runner.model
    if hasattr(model, "prepare_attn_masks") and getattr(runner.model_config, "is_multimodal", True):
        return {type(model).__name__: compat.IMAGES}
    return {}


def _speculation(server_args: Any) -> dict[str, str]:
    """Speculative decoding runs where neither drafting nor verifying comes to this backend."""

    def option(name: str) -> Any:
        return compat.option(server_args, name)

    if not option("speculative_algorithm"):
        return {}
    place = f"--speculative-algorithm {option('speculative_algorithm')}"
    if option("speculative_attention_mode") != "decode":
        return {place: "the draft's tree mask is not served; use --speculative-attention-mode decode"}
    decode = option("decode_attention_backend") or option("attention_backend")
    if NAME in (decode, option("speculative_draft_attention_backend")):
        hint = "--decode-attention-backend and --speculative-draft-attention-backend"
        return {place: f"drafting and verifying need one of SGLang's own backends; name it with {hint}"}
    return {}
